"""The console: a page at `/console` that compares full prefill with blends and shows the state of the
service.

`routes` serves the page's files and the endpoints under `/console/api`. `comparison`
answers one question in both ways, `view` describes a blend layer by layer, and `live` describes the service.
The page's code is vanilla ES modules in `static`.
"""

CONSOLE_PATH = "/console"
