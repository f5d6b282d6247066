"""The command line `kintsugi`: its output for people, and the same as JSON. It makes no blending decision."""
