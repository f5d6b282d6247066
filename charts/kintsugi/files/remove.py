"""Delete this release's custom resources before Helm deletes the chart, and wait until they are gone.

Otherwise Helm would delete the operator first, and no operator would be left to drain the service and remove
its finalizer.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

ACCOUNT = os.environ.get("KINTSUGI_ACCOUNT", "/var/run/secrets/kubernetes.io/serviceaccount")
API = os.environ.get("KINTSUGI_API") or "https://{KUBERNETES_SERVICE_HOST}:{KUBERNETES_SERVICE_PORT}".format(
    **{"KUBERNETES_SERVICE_HOST": "", "KUBERNETES_SERVICE_PORT": "", **os.environ}
)
PAUSE_S = 2.0


def call(method: str, path: str) -> int:
    """The status of a call for one object."""
    with open(f"{ACCOUNT}/token", encoding="ascii") as file:
        headers = {"Authorization": f"Bearer {file.read().strip()}", "Accept": "application/json"}
    request = urllib.request.Request(API + path, method=method, headers=headers)
    context = ssl.create_default_context(cafile=f"{ACCOUNT}/ca.crt") if API.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return 404
        print(f"{method} {path}: {error.code} {error.read().decode(errors='replace')}", file=sys.stderr)
        raise


def main() -> int:
    namespace, deadline = os.environ["KINTSUGI_NAMESPACE"], time.monotonic() + float(os.environ["TIMEOUT_S"])
    folder = f"/apis/kintsugi.dev/v1alpha1/namespaces/{namespace}"
    left = [f"{folder}/{one}" for one in json.loads(os.environ["KINTSUGI_OBJECTS"])]
    for path in left:
        call("DELETE", path)
    while left := [path for path in left if call("GET", path) != 404]:
        if time.monotonic() + PAUSE_S > deadline:
            print(f"still there: {', '.join(left)}; is the operator running?", file=sys.stderr)
            return 1
        print(f"waiting for {len(left)} to drain and go", flush=True)
        time.sleep(PAUSE_S)
    return 0


if __name__ == "__main__":
    sys.exit(main())
