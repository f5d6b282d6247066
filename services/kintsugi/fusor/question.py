"""The question's pass: measures the question's attention to loaded tokens before any of them is recomputed.

The tokens that are always computed (the question and the text between chunks) pass through the first layers
over the loaded KV, as in full KV reuse. If `fusor.gaps` leaves tokens out, the pass has its own cache without
them, because a paged cache cannot hide positions. At each query layer, the attention weights of the tokens
after the last hit are summed per loaded token. The prompt's last token is one of these queries, although the
blend leaves it to the engine: it produces the answer, so it attends to the tokens that contain the answer.
The blend pass then selects by these sums and starts from layer 0. The K and V fetched for this pass that the
blend still needs (`fusor.blend.needs_loaded`) stay in memory.

The softmax covers only positions from the first hit that is not exact as loaded (`BlendPlan.exact_end`).
Earlier positions may be in the engine's prefix cache, which cannot be read, and that must not change the
selection.

Cost, in token-layers: the tokens, times the layers before the last query layer, plus `projection_share` for
the last one. In addition, each query layer takes ``question · tokens · query heads · head_dim``
multiplications in fp32, half of that layer's attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from kintsugi.fusor.loader import LoadedLayer
from kintsugi.fusor.sliced import Cut, Units, run_in_units
from kintsugi.fusor.stack import AttentionRule, DecoderStack, FreshKV, Hidden
from kintsugi.fusor.staging import upload

WEIGHTS_MAX = 1 << 23
"""Maximum number of attention weights in memory at a time: 32 MiB."""


class QuestionPass:
    """The pass of one prompt. Call `pass_layer` for layers 0, 1, … `num_layers` - 1; then `attention` is
    complete."""

    def __init__(
        self,
        stack: DecoderStack,
        hit_positions: Tensor,
        positions: Tensor,
        hidden: Hidden,
        query_layers: tuple[int, ...],
        unit_tokens_max: int,
        exact_end: int,
        begins: int,
        left_out: Sequence[range],
    ) -> None:
        """`positions` of the tokens that pass: int64, ascending; `hidden`: their embedding. Hit tokens before
        `exact_end` get no weight; at least one hit token lies after it. The tokens from `begins` on, after
        the last hit, are the queries; there is at least one. `left_out`: positions without places in
        `stack`'s cache, in ascending ranges. Positions lie on the host."""
        self.num_layers = max(query_layers) + 1
        self.attention = torch.zeros(len(hit_positions), device=stack.device)
        """Attention to each hit token, fp32 `[hit tokens]`, summed over this rank's query heads."""
        self._stack = stack
        self._query_layers = query_layers
        self._hit_slots = stack.slots(find_places(hit_positions, left_out))
        # Positions ascend, so each part is a slice from some row to the end, which the host can compute.
        self._queries = slice(_row_behind(positions, begins - 1), None)
        self._weighed = slice(_row_behind(hit_positions, exact_end - 1), None)
        weighed = hit_positions[self._weighed]
        self._keyed = slice(_row_behind(positions, int(weighed[0]) - 1), None)
        query_positions, fresh_positions = positions[self._queries], positions[self._keyed]
        assert len(query_positions)
        self._query_positions = upload(query_positions, stack.device)
        self._key_positions = upload(torch.cat((weighed, fresh_positions)), stack.device)
        self._cut = Cut.of(stack, positions, unit_tokens_max, find_places(positions, left_out))
        self._hidden = hidden

    def pass_layer(self, layer: int, loaded: LoadedLayer) -> Units[None]:
        is_query_layer = layer in self._query_layers
        if layer == self.num_layers - 1:
            fresh = yield from self._project(layer, self._hidden)
        else:
            self._stack.begin_layer(layer)
            self._stack.write_kv(layer, self._hit_slots, loaded.key, loaded.value)
            fresh = yield from run_in_units(
                self._stack, layer, self._hidden, self._cut, capture=is_query_layer
            )
            self._stack.end_layer(layer)
        if is_query_layer:
            self._stack.contain(partial(self._add_attention, layer, loaded, fresh), lambda: None)

    def _project(self, layer: int, hidden: Hidden) -> Units[list[FreshKV]]:
        """Compute only queries and keys, which are all that the last query layer needs."""
        projected: list[FreshKV] = []
        for rows, batch in self._cut.units:
            projected.append(self._stack.project_kv(layer, hidden.take(rows), batch))
            yield batch.num_tokens * self._stack.projection_share
        return projected

    def _add_attention(self, layer: int, loaded: LoadedLayer, fresh: list[FreshKV]) -> None:
        query = torch.cat([part.query for part in fresh])[self._queries]
        rule, loaded_key = self._stack.attention_rule(layer), loaded.key[self._weighed]
        key = torch.cat([loaded_key, torch.cat([part.key for part in fresh])[self._keyed]])
        if rule.absorb is not None:
            latent = torch.cat([part.value for part in fresh])[self._keyed]
            latent = torch.cat([loaded.value[self._weighed], latent])
            query, key = rule.absorb(query), torch.cat((key, latent), -1)
        weights = attention_mass(query, self._query_positions, key, self._key_positions, rule)
        self.attention[self._weighed] += weights[: len(loaded_key)]


def find_places(positions: Tensor, left_out: Sequence[range]) -> Tensor:
    """Return the places of int64 `positions` in a cache without the ranges `left_out`, which contain none of
    them."""
    if not left_out:
        return positions
    ends = torch.tensor([gap.stop for gap in left_out])
    gone = torch.tensor([0, *(len(gap) for gap in left_out)]).cumsum(0)
    return positions - gone[torch.searchsorted(ends, positions, right=True)]


def _row_behind(positions: Tensor, position: int) -> int:
    """Return the first row of ascending `positions`, on the host, after `position`."""
    return int(torch.searchsorted(positions, position, right=True))


def attention_mass(
    query: Tensor, query_positions: Tensor, key: Tensor, key_positions: Tensor, rule: AttentionRule
) -> Tensor:
    """Sum attention weights over queries and heads: fp32 `[keys]`.

    `query` `[queries, heads, head_dim]` and `key` `[keys, kv_heads, head_dim]` after RoPE; positions int64,
    keys in any order. Every query must see at least one key. Sinks take a share of each query's weight.
    """
    kernel = rule.kernel
    is_plain = rule.sinks is None and rule.slopes is None
    if kernel is not None and is_plain and kernel.serves(query, key, rule.softcap):
        return kernel.attention_mass(
            query, query_positions, key, key_positions, rule.scale, rule.sliding_window
        )
    num_kv_heads = key.shape[1]
    group = query.shape[1] // num_kv_heads
    total = torch.zeros(len(key), device=key.device)
    rows = max(1, WEIGHTS_MAX // (len(key) * group))
    for start in range(0, len(query), rows):
        mine = slice(start, start + rows)
        distance = query_positions[mine, None] - key_positions[None]
        hidden = distance < 0
        if rule.sliding_window is not None:
            hidden |= distance >= rule.sliding_window
        for head in range(num_kv_heads):
            grouped = query[mine, head * group : (head + 1) * group].float()
            logits = torch.einsum("qgd,kd->gqk", grouped, key[:, head].float()) * rule.scale
            if rule.softcap is not None:
                logits = rule.softcap * torch.tanh(logits / rule.softcap)
            if rule.slopes is not None:
                slopes = rule.slopes[head * group : (head + 1) * group].float()
                logits -= slopes[:, None, None] * distance
            logits.masked_fill_(hidden, float("-inf"))
            if rule.sinks is not None:
                sinks = rule.sinks[head * group : (head + 1) * group].float()
                logits = torch.cat((logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)), -1)
            total += logits.softmax(-1).sum((0, 1))[: len(key)]
    return total
