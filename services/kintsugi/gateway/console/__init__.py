"""The console: a page at `/console` that compares full prefill with blends and shows the state of the
service.

`routes` serves the page's files and the endpoints under `/console/api`, and describes the service.
`comparison` answers one question in both ways, and describes the blend layer by layer. The page's code is
vanilla ES modules in `static`.
"""

CONSOLE_PATH = "/console"
