"""The data plane alone: weights, a paged cache and compiled steps, without engine or scheduler.

    python examples/data_plane.py

The batch is laid out by hand: one sequence, page i of it in page i of the pool.
"""

from swiftjax.batch import BatchShape, empty_batch
from swiftjax.converters.demo_model import resolve_model
from swiftjax.converters.load import load_checkpoint
from swiftjax.engine.tokenizer import Tokenizer
from swiftjax.model.assembly import make_runner

PAGE_SIZE, NUM_PAGES = 16, 4
loaded = load_checkpoint(resolve_model("smollm2-135m"), dtype=None)
tokenizer = Tokenizer(loaded.tokenizer_files)
runner = make_runner(
    loaded.config, loaded.params, max_num_seqs=1, num_pages=NUM_PAGES, page_size=PAGE_SIZE,
    max_model_len=PAGE_SIZE * NUM_PAGES, implementation="xla",
)  # fmt: skip


def step(new_tokens: list[int], start: int) -> int:
    """Compute the tokens from position `start` on; the most likely token after them."""
    count = len(new_tokens)
    shape = BatchShape(num_tokens=count, num_seqs=1, max_pages=NUM_PAGES)
    batch = empty_batch(shape, num_slots=PAGE_SIZE * NUM_PAGES)
    batch.token_ids[:] = new_tokens
    batch.positions[:] = batch.slot_mapping[:] = range(start, start + count)
    batch.page_table[0] = range(NUM_PAGES)
    batch.query_starts[1:] = count
    batch.context_lens[0] = start + count
    batch.sample_rows[0] = count - 1
    return runner.dispatch(batch).wait(1).token_ids[0]


tokens = tokenizer.encode("The capital of France is")
new = tokens
for _ in range(12):
    new = [step(new, len(tokens) - len(new))]
    tokens = tokens + new
print(tokenizer.decode(tokens))
