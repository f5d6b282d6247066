"""Generated stubs of `proto/kintsugi/rpc`; `make proto` writes them, nobody edits them."""
