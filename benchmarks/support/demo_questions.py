"""Asks the reference model every question of the demo, and records its answers as one more round.

With full prefill, full KV reuse and the demo's blend, over the demo's passages in its order. The answers go
into the file that ships, of which the demo shows one question and counts all. Rounding errors depend on what
is computed together and with which instructions, so the first round asks all at once; the second and the
third ask one by one, the third without AVX-512, and only what full prefill answered right:

    python -m benchmarks.support.demo_questions --restart
    python -m benchmarks.support.demo_questions --alone
    ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 python -m benchmarks.support.demo_questions --alone
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kintsugi.cli.commands.demo import BLEND, MAX_TOKENS, NAMESPACE, demo_texts
from kintsugi.cli.screen import Screen
from kintsugi.cli.session import UNTESTED, Asked, Session, open_session
from kintsugi.core.plan import Selection, make_trial
from kintsugi.core.request import KintsugiParams
from kintsugi.engine.local import Prompt
from kintsugi.models.bundled import packaged_files
from kintsugi.models.demo_questions import (
    QUESTIONS_FILE,
    DemoQuestion,
    RightAnswers,
    Said,
    read_demo_questions,
)
from kintsugi.models.reference import REFERENCE

LONGEST_QUESTION_TOKENS = 64


def ask(session: Session, questions: Sequence[DemoQuestion], alone: bool) -> list[Said]:
    """Return the model's answer to each question: asked one by one if ``alone``, else all at once."""
    engine = session.engine
    prompts = [session.form.build(session.prompt.chunks, question.question) for question in questions]

    def answer(ratio: float | None) -> list[str]:
        engine.reset_prefix_cache()
        params = None
        if ratio == 0.0:
            params = KintsugiParams(NAMESPACE, spans=prompts[0].spans, trial=make_trial(Selection(0.0)))
        elif ratio is not None:
            params = KintsugiParams(NAMESPACE, spans=prompts[0].spans, ratio=ratio, selector=BLEND.selector)
        batch = [Prompt(prompt.token_ids, params, MAX_TOKENS) for prompt in prompts]
        groups = [[prompt] for prompt in batch] if alone else [batch]
        return [generation.text for group in groups for generation in engine.generate(group)]

    full = answer(None)
    reuse = answer(0.0)
    return [Said(*texts) for texts in zip(full, reuse, answer(BLEND.ratio), strict=True)]


def write_questions(path: Path, questions: Sequence[DemoQuestion]) -> None:
    """Write the questions as JSON lines, compressed, replacing the file's content."""
    lines = [json.dumps(asdict(question), ensure_ascii=False) for question in questions]
    path.write_bytes(lzma.compress(("\n".join(lines) + "\n").encode(), preset=9 | lzma.PRESET_EXTREME))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    shipped = packaged_files() / QUESTIONS_FILE
    parser.add_argument(
        "--out", type=Path, default=shipped, help="compressed JSON lines; default: the file that ships"
    )
    parser.add_argument("--alone", action="store_true", help="ask one by one, not all at once")
    parser.add_argument("--restart", action="store_true", help="forget the rounds before")
    arguments = parser.parse_args()
    questions = read_demo_questions()
    if arguments.restart:
        questions = tuple(replace(question, said=()) for question in questions)
    asked = [question for question in questions if question.full_is_right or not question.said]
    screen = Screen(as_json=False)
    longest = Asked(demo_texts(), max((question.question for question in questions), key=len))
    room = MAX_TOKENS + LONGEST_QUESTION_TOKENS
    with (
        open_session(screen, REFERENCE.name, longest, NAMESPACE, room, UNTESTED) as session,
        screen.step("Asking"),
    ):
        said = dict(zip(asked, ask(session, asked, arguments.alone), strict=True))
    answered = [
        replace(question, said=(*question.said, said[question])) if question in said else question
        for question in questions
    ]
    write_questions(arguments.out, answered)
    for name, count in asdict(RightAnswers.of(answered)).items():
        print(name, count)


if __name__ == "__main__":
    main()
