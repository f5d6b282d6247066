"""The console: a page at `/console` that compares full prefill with blends and shows the service live.

`assets` holds the page's files, `routes` serves them and the endpoints under `/console/api`, `comparison`
answers one question both ways, `live` describes the service, `view` describes one blend layer by layer. The
page's code is vanilla ES modules in `static`.
"""
