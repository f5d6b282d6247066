"""Which tokens count as due to be hit, and as hit."""

from __future__ import annotations

from benchmarks.support.discovered import agent
from benchmarks.support.discovered.service import hit_figure, ttft_figure
from benchmarks.support.load.profile import Request
from benchmarks.support.load.report import Sample


def asked(*documents: int) -> Request:
    return Request(0.0, documents, "?")


def told(tokens_discovered: int, tokens_prefix_cached: int = 0) -> Sample:
    accounting = {"tokens_discovered": tokens_discovered, "tokens_prefix_cached": tokens_prefix_cached}
    return Sample(0.0, 1.0, 1.0, accounting=accounting)


def test_passages_are_due_from_their_third_sight_on() -> None:
    coming = [asked(0, 1), asked(1, 0), asked(0, 2), asked(1, 0)]
    figure = hit_figure(coming, [told(0), told(0), told(100), told(0)], [100, 50, 30], bar=0.9)
    assert figure.value == 100 / (100 + 150)
    assert figure.holds is False


def test_more_than_is_due_counts_no_more() -> None:
    figure = hit_figure([asked(0), asked(0), asked(0)], [told(9), told(99), told(500)], [100], bar=None)
    assert figure.value == 1.0


def test_what_the_prefix_cache_holds_counts_only_of_passages_that_are_due() -> None:
    coming = [asked(0), asked(0), asked(0, 1), asked(1, 0)]
    figure = hit_figure(coming, [told(0), told(0), told(20, 96), told(50, 96)], [100, 100], bar=None)
    assert figure.value == (100 + 50) / 200


def test_requests_that_fail_are_left_out_of_the_means_and_the_figure_does_not_hold() -> None:
    plain = [Sample(0.0, 4.0, 5.0), Sample(1.0, 2.0, 3.0), Sample(2.0, 9.0, 9.5)]
    ours = [Sample(0.0, 2.0, 3.0), Sample(1.0, 1.0, 2.0), Sample(2.0, None, 0.1, error="ConnectError")]
    figure = ttft_figure("ratio", {"plain": plain, "kintsugi": ours}, bar=1.4)
    assert (figure.value, figure.holds) == (2.0, False)
    assert figure.detail.endswith("1 failed")
    assert ttft_figure("ratio", {"plain": plain[:2], "kintsugi": ours[:2]}, bar=1.4).holds is True
    assert ttft_figure("ratio", {"plain": plain[2:], "kintsugi": ours[2:]}, bar=1.4).value is None


METRICS = """# HELP vllm:prompt_tokens_total Number of prefill tokens processed.
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{{engine="0",model_name="m"}} {prompt}
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="local_compute"}} 70.0
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="local_cache_hit"}} {cached}
vllm:prompt_tokens_by_source_total{{engine="0",model_name="m",source="external_kv_transfer"}} 500.0
"""
BLENDED = """# HELP kintsugi_blend_tokens_hit_total Sum of tokens_hit over blended requests
# TYPE kintsugi_blend_tokens_hit_total counter
kintsugi_blend_tokens_hit_total{engine="0",model_name="m"} 400.0
# HELP kintsugi_requests_total Requests
# TYPE kintsugi_requests_total counter
kintsugi_requests_total{engine="0",model_name="m",outcome="declined",reason="no_chunk_cached"} 2.0
kintsugi_requests_total{engine="0",model_name="m",outcome="declined",reason="busy"} 1.0
kintsugi_requests_total{engine="0",model_name="m",outcome="blended",reason="none"} 3.0
"""


def test_an_agents_hits_are_read_from_its_servers_counters() -> None:
    """Not from what vLLM says came from outside: of a blended prompt that is all but the last token."""
    before = agent.Counted.of(METRICS.format(prompt=200.0, cached=50.0))
    after = agent.Counted.of(METRICS.format(prompt=1200.0, cached=350.0) + BLENDED)
    figure = agent.hit_figure(after.since(before), bar=0.6)
    assert figure.value == (300 + 400) / 1000
    assert figure.holds is True
    assert "{'blended': 3, 'declined': 3}" in figure.detail
