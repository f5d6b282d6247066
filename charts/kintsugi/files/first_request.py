"""The first request to a new gateway: wait until it serves the model, ask, print the answer."""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

PAUSE_S = 5.0


def main() -> int:
    url, model = os.environ["KINTSUGI_URL"], os.environ["KINTSUGI_MODEL"]
    deadline = time.monotonic() + float(os.environ["KINTSUGI_TIMEOUT_S"])
    body = {"model": model, "prompt": os.environ["KINTSUGI_PROMPT"], "max_tokens": 16, "temperature": 0}
    while True:
        try:
            answer = post(f"{url}/v1/completions", body)
        except urllib.error.HTTPError as error:
            if error.code < 500 and error.code != 429:
                print(f"{url} refused: {error.code} {error.read().decode(errors='replace')}", file=sys.stderr)
                return 1
            problem = f"{error.code} {error.reason}"
        except OSError as error:
            problem = str(error)
        else:
            print(json.dumps(answer, indent=2))
            return 0 if answer["usage"]["completion_tokens"] > 0 else 1
        if time.monotonic() + PAUSE_S > deadline:
            print(f"{url} did not answer in time: {problem}", file=sys.stderr)
            return 1
        print(f"waiting for {url}: {problem}", flush=True)
        time.sleep(PAUSE_S)


def post(url: str, body: dict[str, object]) -> dict[str, dict[str, int]]:
    """The JSON that comes back."""
    headers = {"Content-Type": "application/json", "X-Kintsugi-Namespace": os.environ["KINTSUGI_NAMESPACE"]}
    if token := os.environ.get("KINTSUGI_TOKEN"):
        headers["Authorization"] = f"Bearer {token}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    context = None
    if folder := os.environ.get("KINTSUGI_TLS"):
        authority = f"{folder}/ca.crt" if os.path.exists(f"{folder}/ca.crt") else f"{folder}/tls.crt"
        context = ssl.create_default_context(cafile=authority)
        if os.environ.get("KINTSUGI_TLS_CLIENT"):
            context.load_cert_chain(f"{folder}/tls.crt", f"{folder}/tls.key")
    with urllib.request.urlopen(request, timeout=120, context=context) as response:
        answer: dict[str, dict[str, int]] = json.load(response)
        return answer


if __name__ == "__main__":
    sys.exit(main())
