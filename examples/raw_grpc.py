"""The gateway's wire without our SDK: what a client in another language does, with stubs of gateway.proto.

    python examples/raw_grpc.py [--address HOST:PORT] [--namespace NAME] [--token TOKEN]

The gateway supports server reflection, so grpcurl can call it, too:

    grpcurl -plaintext -d '{"namespace": "notes", "texts": ["a b"]}' \\
        HOST:PORT kintsugi.rpc.v1.Kintsugi/Tokenize
"""

from __future__ import annotations

import argparse

import grpc

from kintsugi.rpc.v1 import gateway_pb2 as pb
from kintsugi.rpc.v1.gateway_pb2_grpc import KintsugiStub

PASSAGES = ["The kettle is on the left shelf.", "The left shelf is behind the door."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:7500")
    parser.add_argument("--namespace", default="notes")
    parser.add_argument("--token", help="token from `kintsugi token`, if the gateway requires one")
    arguments = parser.parse_args()
    metadata = [("x-request-id", "raw-grpc-example")]
    if arguments.token:
        metadata.append(("authorization", f"Bearer {arguments.token}"))
    with grpc.insecure_channel(arguments.address) as channel:
        try:
            ask(KintsugiStub(channel), arguments.namespace, metadata)
        except grpc.RpcError as error:
            # The details say what to change. The code is a gRPC status code.
            raise SystemExit(f"{error.code().name}: {error.details()}") from None


def ask(kintsugi: KintsugiStub, namespace: str, metadata: list[tuple[str, str]]) -> None:
    """Store two passages, then ask about them by key."""
    chunks = [pb.Content(text=passage) for passage in PASSAGES]
    put = kintsugi.PutChunks(
        pb.PutChunksRequest(namespace=namespace, chunks=chunks, wait=True), metadata=metadata, timeout=60
    )
    request = pb.GenerateRequest(
        namespace=namespace,
        segments=[pb.Segment(chunk_key=result.key) for result in put.results],
        question=pb.Content(text="\nQuestion: where is the kettle?\nAnswer:"),
        sampling=pb.Sampling(max_tokens=16, temperature=0.0),
    )
    for message in kintsugi.Generate(request, metadata=metadata, timeout=60):
        show(message)


def show(message: pb.GenerateResponse) -> None:
    """Print one event of an answer: the prompt's chunks, a piece of text, or the final accounting."""
    kind = message.WhichOneof("event")
    if kind == "resolved":
        for segment in message.resolved.segments:
            print(f"chunk {segment.key[:8]} is tokens [{segment.start}, {segment.end})")
    elif kind == "delta":
        print(message.delta.text, end="", flush=True)
    else:
        plan, usage = message.finished.plan, message.finished.usage
        print(f"\n{plan.outcome}: {plan.chunks_hit} chunks loaded, {usage.prompt_tokens} prompt tokens")


if __name__ == "__main__":
    main()
