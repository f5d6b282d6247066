"""The command `kintsugi`: what a person sees, and its JSON twin. It decides nothing about blending."""
