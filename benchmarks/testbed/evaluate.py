"""Exact match on fresh questions: full prefill against full KV reuse, task by task.

    python -m benchmarks.testbed.evaluate --model runs/bundled --prompts 300

Full prefill reads BOS, the chunks and the question in one causal pass. Full KV reuse prefills each chunk
alone after BOS, keeps its keys before RoPE and its values, rotates the keys to where the chunk stands in
the prompt, and lets only the question attend to everything. Both use the checkpoint's own weights in plain
torch (fp32). Prints a table, then one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.testbed.generator import (
    CONTROL_TASK,
    EVAL_SHAPE,
    TASKS,
    Example,
    Shape,
    eval_example,
)
from benchmarks.testbed.model import Layer, ModelShape, TinyModel, rotate, rotation


@dataclass(frozen=True)
class Prompt:
    """Token ids of one example: the chunks, the question, and the one-token answer."""

    chunks: tuple[tuple[int, ...], ...]
    question: tuple[int, ...]
    answer: int

    @property
    def tokens(self) -> int:
        """Length of the whole prompt, BOS included."""
        return 1 + sum(map(len, self.chunks)) + len(self.question)


@dataclass(frozen=True)
class LayerKv:
    """One layer's keys before RoPE and values, each [kv_heads, tokens, head_dim]."""

    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class TaskScore:
    """Exact match of one task."""

    task: str
    prompts: int
    full: float
    reuse: float
    tokens_mean: float


class Bundle:
    """A checkpoint folder: model, token ids, BOS."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        config = json.loads((directory / "config.json").read_text())
        fields = ModelShape.__dataclass_fields__
        values = {name: config[name] for name in fields if name in config and name != "rope_theta"}
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self.model = TinyModel(ModelShape(**values, rope_theta=float(theta)))
        weights = load_file(directory / "model.safetensors")
        self.model.load_state_dict({name: value.float() for name, value in weights.items()})
        self.model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self.bos: int = self.tokenizer.bos_token_id

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without BOS."""
        return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def prompt(self, example: Example) -> Prompt:
        """The example in token ids. Raises ValueError if the answer is not one token."""
        chunks = tuple(self.encode(chunk) for chunk in example.chunks)
        (answer,) = self.encode(" " + example.answer)
        return Prompt(chunks, self.encode(example.question), answer)


def project(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [heads, tokens, head_dim], keys and values [kv_heads, tokens, head_dim], all before RoPE and
    after the QK-norm, if there is one."""
    attention = layer.self_attn
    hidden = layer.input_layernorm(x)

    def by_head(projected: Tensor, heads: int) -> Tensor:
        return projected.view(-1, heads, attention.head_dim).transpose(0, 1)

    return (
        attention.q_norm(by_head(attention.q_proj(hidden), attention.heads)),
        attention.k_norm(by_head(attention.k_proj(hidden), attention.kv_heads)),
        by_head(attention.v_proj(hidden), attention.kv_heads),
    )


@torch.no_grad()
def run_tokens(model: TinyModel, tokens: Tensor, past: list[LayerKv]) -> tuple[Tensor, list[LayerKv]]:
    """Runs token ids [n] after `past` (one entry a layer, or none) as a causal continuation.

    Returns:
        (logits of the last token [vocabulary], the KV of past and new tokens, keys before RoPE).
    """
    shape = model.shape
    start = past[0].keys.shape[1] if past else 0
    total = start + len(tokens)
    cos, sin = rotation(shape, torch.arange(total))
    mask = torch.full((total, total), -math.inf).triu(1)[start:]
    group = shape.num_attention_heads // shape.num_key_value_heads
    x = model.model.embed_tokens(tokens)
    grown = []
    for index, layer in enumerate(model.decoder_layers()):
        q, keys, values = project(layer, x)
        if past:
            keys = torch.cat((past[index].keys, keys), dim=1)
            values = torch.cat((past[index].values, values), dim=1)
        grown.append(LayerKv(keys, values))
        q = rotate(q, cos[start:], sin[start:])
        k = rotate(keys, cos, sin).repeat_interleave(group, dim=0)
        scores = q @ k.transpose(1, 2) / math.sqrt(shape.head_dim) + mask
        mixed = scores.softmax(-1) @ values.repeat_interleave(group, dim=0)
        x = x + layer.self_attn.o_proj(mixed.transpose(0, 1).reshape(len(tokens), -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    logits: Tensor = model.lm_head(model.model.norm(x[-1]))
    return logits, grown


def full_prefill(bundle: Bundle, prompt: Prompt) -> Tensor:
    """Logits [vocabulary] after the question after an ordinary prefill of everything."""
    ids = [bundle.bos, *(token for chunk in prompt.chunks for token in chunk), *prompt.question]
    return run_tokens(bundle.model, torch.tensor(ids), [])[0]


def full_reuse(bundle: Bundle, prompt: Prompt) -> Tensor:
    """Logits [vocabulary] after the question over chunk KV computed in isolation, keys re-rotated."""
    pieces: list[list[LayerKv]] = [run_tokens(bundle.model, torch.tensor([bundle.bos]), [])[1]]
    for chunk in prompt.chunks:
        alone = run_tokens(bundle.model, torch.tensor([bundle.bos, *chunk]), [])[1]
        pieces.append([LayerKv(kv.keys[:, 1:], kv.values[:, 1:]) for kv in alone])
    merged = [
        LayerKv(
            torch.cat([piece[layer].keys for piece in pieces], dim=1),
            torch.cat([piece[layer].values for piece in pieces], dim=1),
        )
        for layer in range(bundle.model.shape.num_hidden_layers)
    ]
    return run_tokens(bundle.model, torch.tensor(prompt.question), merged)[0]


def score_task(bundle: Bundle, task: str, indices: Iterable[int], shape: Shape) -> TaskScore:
    """Exact match of both ways on the evaluation examples `indices` of a task."""
    full = reuse = tokens = count = 0
    for index in indices:
        prompt = bundle.prompt(eval_example(task, index, shape))
        full += int(full_prefill(bundle, prompt).argmax()) == prompt.answer
        reuse += int(full_reuse(bundle, prompt).argmax()) == prompt.answer
        tokens += prompt.tokens
        count += 1
    return TaskScore(task, count, full / count, reuse / count, tokens / count)


def showcase(bundle: Bundle, task: str, first_index: int, shape: Shape, tries: int = 200) -> list[object]:
    """The first evaluation example of a task that full prefill answers and full reuse does not, if any."""
    for index in range(first_index, first_index + tries):
        example = eval_example(task, index, shape)
        prompt = bundle.prompt(example)
        full = int(full_prefill(bundle, prompt).argmax())
        reused = int(full_reuse(bundle, prompt).argmax())
        if full == prompt.answer != reused:
            said = str(bundle.tokenizer.decode([reused])).strip()
            return [{**asdict(example), "tokens": prompt.tokens, "full": example.answer, "reuse": said}]
    return []


def summary(scores: list[TaskScore], first_index: int) -> dict[str, object]:
    """What the last line holds."""
    crossing = [score for score in scores if score.task != CONTROL_TASK]
    full = sum(score.full for score in crossing) / max(1, len(crossing))
    reuse = sum(score.reuse for score in crossing) / max(1, len(crossing))
    return {
        "full_em": round(full, 4),
        "reuse_em": round(reuse, 4),
        "reuse_gap_points": round(100 * (full - reuse), 2),
        "first_index": first_index,
        "tasks": {
            score.task: {
                "prompts": score.prompts,
                "full": round(score.full, 4),
                "reuse": round(score.reuse, 4),
                "tokens_mean": round(score.tokens_mean, 1),
            }
            for score in scores
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("runs/bundled"))
    parser.add_argument("--prompts", type=int, default=300)
    parser.add_argument("--first-index", type=int, default=0, help="index of the first evaluation example")
    parser.add_argument("--tasks", default=",".join(TASKS))
    parser.add_argument("--chunks", default=None, help="least,most chunks instead of the default shape's")
    parser.add_argument("--fillers", default=None, help="least,most fillers a chunk")
    parser.add_argument("--showcase", type=Path, help="write examples that only full prefill answers here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = EVAL_SHAPE
    changes = {"chunks": arguments.chunks, "fillers_per_chunk": arguments.fillers}
    for name, value in changes.items():
        if value is not None:
            least, most = map(int, value.split(","))
            shape = replace(shape, **{name: (least, most)})  # type: ignore[arg-type]
    bundle = Bundle(arguments.model)
    indices = range(arguments.first_index, arguments.first_index + arguments.prompts)
    print(f"{'task':<10}{'prompts':>8}{'tokens':>8}{'full':>8}{'reuse':>8}", flush=True)
    scores = []
    for task in arguments.tasks.split(","):
        score = score_task(bundle, task, indices, shape)
        scores.append(score)
        print(
            f"{task:<10}{score.prompts:>8}{score.tokens_mean:>8.0f}{score.full:>8.3f}{score.reuse:>8.3f}",
            flush=True,
        )
    if arguments.showcase is not None:
        after = arguments.first_index + arguments.prompts
        tasks = [score.task for score in scores if score.task != CONTROL_TASK]
        found = [item for task in tasks for item in showcase(bundle, task, after, shape)]
        arguments.showcase.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(summary(scores, arguments.first_index)))


if __name__ == "__main__":
    main()
