"""What is said about a service that does not start."""

from __future__ import annotations

import pytest

pytest.importorskip("ray", reason="install the extra `serving`")

from kintsugi.serving.service import MESSAGE_CHARS_MAX, cause_in

TRACEBACK = """The deployment failed to start 3 times in a row. Error:
ray::ServeReplica:kintsugi:Engine.initialize_and_get_metadata()
  File "asynchronous.py", line 1, in start
ValueError: 3
The above exception was the direct cause of the following exception:
kintsugi.core.errors.Unavailable: vLLM did not start on nothing: ValueError: 3
RuntimeError: Traceback
kintsugi.core.errors.InvalidField: store: names no shard
more of Ray's words"""


def test_our_own_error_is_found_in_a_traceback() -> None:
    assert cause_in(TRACEBACK) == "InvalidField: store: names no shard"


def test_of_others_the_end_is_shown() -> None:
    assert cause_in("x" * 5000 + "the end") == ("x" * 5000 + "the end")[-MESSAGE_CHARS_MAX:]
