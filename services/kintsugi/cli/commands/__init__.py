"""The commands of `kintsugi`, one file each."""
