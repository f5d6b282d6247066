"""The client library: `kintsugi.Client`, `kintsugi.AsyncClient`, and adapters for frameworks."""
