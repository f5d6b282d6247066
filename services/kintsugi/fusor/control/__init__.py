"""The loading controller: load, recompute or refuse, from measured costs."""
