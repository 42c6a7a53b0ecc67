"""Constrained answers: what is refused, and that every answer of a random model fits."""

import json
import random
import time
from typing import Any

import numpy as np
import pytest

from swiftjax.batch import Batch, PageMoves
from swiftjax.engine.constraint import Constraint
from swiftjax.engine.core import EngineCore
from swiftjax.engine.detokenizer import TextStream
from swiftjax.engine.grammar import GrammarCompiler, _bit
from swiftjax.engine.request import GenerationConfig
from swiftjax.errors import InvalidRequestError
from tests.fakes import FakePending, FakeRunner, make_fake_core
from tests.serving.harness import END_ID, VOCAB_SIZE, byte_tokenizer

NUM_SCHEMAS = 1000
MAX_TOKENS = 200
TOKENIZER = byte_tokenizer()
COMPILER = GrammarCompiler(TOKENIZER.files.tokenizer_json, VOCAB_SIZE, (END_ID,))


class RandomRunner(FakeRunner):
    """Draws any allowed token, of plain ASCII and the end where it may; no two logits are alike."""

    def __init__(self, seed: int) -> None:
        super().__init__(VOCAB_SIZE)
        self._rng = np.random.default_rng(seed)

    def dispatch(self, batch: Batch, moves: PageMoves) -> FakePending:
        """Draw from the masks, which a constrained batch must have."""
        super().dispatch(batch, moves)
        if batch.masks is None:
            return FakePending([97] * len(batch.sample_rows))
        bits = np.unpackbits(batch.masks().view(np.uint8), axis=1, bitorder="little")[
            :, :VOCAB_SIZE
        ]
        scores = self._rng.random(bits.shape)
        scores[:, END_ID] += 0.5  # so that not every answer runs into its limit
        return FakePending(np.where(bits > 0, scores, -1.0).argmax(axis=1).tolist())


def make_core(seed: int = 0, **options: Any) -> EngineCore:
    """A core over the byte vocabulary whose model is random."""
    return make_fake_core(
        vocab_size=VOCAB_SIZE, eos_token_ids=(END_ID,), runner=RandomRunner(seed), num_pages=2048,
        max_model_len=1024, max_num_batched_tokens=64, **options,
    )  # fmt: skip


def answer_all(core: EngineCore, constraints: list[Constraint]) -> list[tuple[str, str]]:
    """The texts and the reasons of their ends, all in one batch as far as it goes."""
    streams: dict[str, TextStream] = {}
    answers = {str(i): ("", "") for i in range(len(constraints))}
    for index, constraint in enumerate(constraints):
        config = GenerationConfig(constraint=constraint, max_new_tokens=MAX_TOKENS)
        request = core.limits.resolve(
            str(index), [97, 98], config, fresh_seed=index, arrival_time=0.0,
            grammar=COMPILER.compile(constraint),
        )  # fmt: skip
        streams[str(index)] = TextStream(TOKENIZER, config)
        core.submit(request)
    while core.has_work:
        for output in core.step():
            text, _ = answers[output.request_id]
            delta = streams[output.request_id].push(output.token_ids, output.finish_reason)
            answers[output.request_id] = (text + delta.text, output.finish_reason or "")
    core.scheduler.check_integrity()
    return [answers[str(i)] for i in range(len(constraints))]


def random_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of a few levels."""
    kinds = ["integer", "number", "boolean", "null", "string", "enum", "const"]
    kind = rng.choice(kinds + (["array", "object", "object", "anyOf"] if depth < 3 else []))
    if kind == "enum":
        return {"enum": rng.sample(["a", "é", 1, None, True, [1], {"x": 2}, "🫠"], 3)}
    if kind == "const":
        return {"const": rng.choice(["x", 7, False])}
    if kind == "string":
        limits = {"minLength": rng.randrange(3), "maxLength": rng.randrange(3, 9)}
        return rng.choice([{"type": "string"} | limits, {"type": "string", "pattern": "^[a-c]+$"}])
    if kind == "integer":
        low = rng.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + rng.randrange(100)}
    if kind == "array":
        items = random_schema(rng, depth + 1)
        return {"type": "array", "items": items, "minItems": rng.randrange(2), "maxItems": 3}
    if kind == "anyOf":
        return {"anyOf": [random_schema(rng, depth + 1) for _ in range(2)]}
    if kind == "object":
        names = rng.sample(["a", "b", "c", "näme"], rng.randrange(1, 4))
        properties = {name: random_schema(rng, depth + 1) for name in names}
        required = rng.sample(names, rng.randrange(len(names) + 1))
        return {
            "type": "object", "properties": properties, "required": required,
            "additionalProperties": False,
        }  # fmt: skip
    return {"type": kind}


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Whether a value is of a schema as `random_schema` makes them; written for that alone."""
    if "anyOf" in schema:
        return any(fits(value, part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        return json.dumps(value) in map(json.dumps, schema.get("enum", [schema.get("const")]))
    if schema["type"] == "object":
        known = isinstance(value, dict) and value.keys() <= schema["properties"].keys()
        return (
            known
            and value.keys() >= set(schema["required"])
            and all(fits(part, schema["properties"][name]) for name, part in value.items())
        )
    if schema["type"] == "array":
        is_list = isinstance(value, list) and schema["minItems"] <= len(value) <= schema["maxItems"]
        return is_list and all(fits(part, schema["items"]) for part in value)
    if schema["type"] == "string":
        is_text = isinstance(value, str)
        if "pattern" in schema:
            return is_text and bool(value) and set(value) <= set("abc")
        return is_text and schema["minLength"] <= len(value) <= schema["maxLength"]
    if schema["type"] in ("integer", "number"):
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if schema["type"] == "number":
            return is_number
        return is_number and value == int(value) and schema["minimum"] <= value <= schema["maximum"]
    return value is None if schema["type"] == "null" else isinstance(value, bool)


def test_p16_answers_of_a_random_model_fit_a_thousand_schemas() -> None:
    rng = random.Random(16)
    schemas = [random_schema(rng) for _ in range(NUM_SCHEMAS)]
    constraints = [Constraint(kind="json_schema", text=json.dumps(s)) for s in schemas]
    core = make_core(max_num_seqs=32, max_queue_len=NUM_SCHEMAS)
    num_whole = 0
    for schema, (text, reason) in zip(schemas, answer_all(core, constraints), strict=True):
        if reason == "length":
            continue
        assert reason == "stop"
        assert fits(json.loads(text), schema), (schema, text)
        num_whole += 1
    assert num_whole > 0.8 * NUM_SCHEMAS


@pytest.mark.parametrize(
    ("constraint", "expected"),
    [
        (Constraint(kind="choice", choices=("\U0001fae0",)), {"\U0001fae0"}),
        (Constraint(kind="choice", choices=('"quote"', "back\\slash", "new\nline")), None),
        (Constraint(kind="regex", text="(a|b){2}"), {"aa", "ab", "ba", "bb"}),
        (Constraint(kind="grammar", text='start: "x" ("y" | "z")'), {"xy", "xz"}),
        (Constraint(kind="grammar", text='root ::= "x" end\nend ::= "y" | "z"'), {"xy", "xz"}),
    ],
    ids=["emoji", "quotes", "regex", "lark", "ebnf"],
)
def test_b001_texts_regexes_and_grammars(constraint: Constraint, expected: set[str] | None) -> None:
    answers = answer_all(make_core(max_num_seqs=4), [constraint] * 20)
    assert {reason for _, reason in answers} == {"stop"}
    assert {text for text, _ in answers} <= (expected or set(constraint.choices))


def test_json_object_is_an_object() -> None:
    answers = answer_all(make_core(3), [Constraint(kind="json_object")] * 8)
    whole = [json.loads(text) for text, reason in answers if reason == "stop"]
    assert whole and all(isinstance(value, dict) for value in whole)


def test_constrained_rows_keep_to_themselves_and_outlive_preemption() -> None:
    """Beside a free row, and with pages for one at a time."""
    core = make_core(max_num_seqs=3)
    core.scheduler.preemption.preempt_next()
    config = GenerationConfig(max_new_tokens=20)
    core.submit(core.limits.resolve("free", [97], config, fresh_seed=0, arrival_time=0.0))
    request = core.limits.resolve(
        "bound", [97], GenerationConfig(max_new_tokens=20, n=2), fresh_seed=0, arrival_time=0.0,
        grammar=COMPILER.compile(Constraint(kind="regex", text="[0-9]{12}")),
    )  # fmt: skip
    core.submit(request)
    tokens: dict[tuple[str, int], list[int]] = {}
    for step in range(100):
        if step % 3 == 0:
            core.scheduler.preemption.preempt_next()
        for output in core.step():
            tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
    assert core.scheduler.num_preemptions > 3 and not core.has_work
    for index in (0, 1):
        *digits, end = tokens["bound", index]
        assert end == END_ID and len(digits) == 12 and bytes(digits).isdigit()
    assert len(tokens["free", 0]) <= 20


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "ab**"), ("regex", "("), ("regex", "[x-"), ("regex", "(?P<x>a)(?P=x)"),
        ("regex", "(?=a)b"), ("regex", "(" * 2000),
        ("json_schema", '{"type": "object", "properties": {"foo": "bar"}}'),
        ("json_schema", '{"type": "nope"}'), ("json_schema", "{not json"),
        ("json_schema", '{"$ref": "https://example.org/schema"}'),
        ("json_schema", "[" * 60_000), ("json_schema", '{"a":' * 10_000),
        ("json_schema", '{"type": "string", "pattern": "("}'),
        ("grammar", 'x: "a"'), ("grammar", 'start: "a" | b'), ("grammar", "%%%"),
    ],
)  # fmt: skip
def test_b067_broken_constraints_are_refused_soon(kind: Any, text: str) -> None:
    started = time.process_time()
    with pytest.raises(InvalidRequestError, match=kind) as caught:
        COMPILER.compile(Constraint(kind=kind, text=text))
    assert time.process_time() - started < 2.0
    assert len(str(caught.value)) < 500 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["(a{1,60000}){1,60000}", "(a|aa|aaa|.{0,2000}){0,2000}b", "(.*a){40}"]
)
def test_b067_masks_of_a_hostile_regex_are_bounded(text: str) -> None:
    """They are found step by step, and not by way of an automaton of any size."""
    started = time.process_time()
    state = COMPILER.compile(Constraint(kind="regex", text=text)).start(0)
    words = np.zeros(state.num_words, np.int32)
    for count in range(50):
        state.fill([97] * count, words)
    assert time.process_time() - started < 3.0


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "choice"}, {"kind": "choice", "choices": ("a", "")},
        {"kind": "choice", "choices": ("a",) * 1001}, {"kind": "regex"},
        {"kind": "regex", "text": "a" * 4097}, {"kind": "json_schema", "text": " " * 65537},
        {"kind": "json_object", "text": "{}"}, {"kind": "regex", "text": "a", "choices": ("b",)},
        {"kind": "choice", "choices": ("x" * 66_000,)},
    ],
)  # fmt: skip
def test_b067_sizes_are_checked_before_anything_else(fields: Any) -> None:
    with pytest.raises(InvalidRequestError):
        Constraint(**fields)


@pytest.mark.parametrize(
    "fields",
    [{"min_new_tokens": 1}, {"allowed_token_ids": [97]}, {"banned_token_ids": [97]},
     {"bad_words_ids": [[97]]}, {"ignore_eos": True}],
)  # fmt: skip
def test_what_would_leave_no_token_is_refused(fields: Any) -> None:
    with pytest.raises(InvalidRequestError, match=next(iter(fields))):
        GenerationConfig(constraint=Constraint(kind="json_object"), **fields)


def test_model_that_cannot_end_takes_no_constraint() -> None:
    compiler = GrammarCompiler(TOKENIZER.files.tokenizer_json, VOCAB_SIZE, ())
    with pytest.raises(InvalidRequestError, match="no answer could end"):
        compiler.compile(Constraint(kind="json_object"))


class _Broken:
    """A matcher that panics, as a bug of the library would."""

    def is_error(self) -> bool:
        return False

    def stop_reason(self) -> str:
        return "InternalError"

    def consume_token(self, _: int) -> bool:
        return True

    def unsafe_compute_mask_ptr(self, *_: int) -> None:
        raise type("PanicException", (BaseException,), {})("the text of an answer")


def test_panic_in_a_mask_ends_that_answer_and_nothing_else(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = COMPILER.compile(Constraint(kind="regex", text="a*")).start(1)
    state._matcher = _Broken()
    words = np.full(state.num_words, -1, np.int32)
    for count in (1, 2):
        state.fill([97] * count, words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        assert bits.nonzero()[0].tolist() == [END_ID]
    assert "text of an answer" not in caplog.text and len(caplog.records) == 1


def test_bits_of_a_word_are_those_of_an_int32() -> None:
    words = np.zeros(32, np.int32)
    for place in range(32):
        words[place] |= _bit(place)
    assert words.view(np.uint32).tolist() == [1 << place for place in range(32)]
