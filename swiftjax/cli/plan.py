"""`swiftjax plan`: what an engine would take and hold, before any weight is loaded."""

import json
from typing import TYPE_CHECKING, Any

from swiftjax.cli import options as opt
from swiftjax.config import EngineConfig
from swiftjax.memory import GIB, fitting_sequences

if TYPE_CHECKING:
    from swiftjax.sizing import PlannedEngine

LENGTHS = (512, 2048, 8192, 32768, 131072)


def plan(
    model: opt.Model,
    load_format: opt.LoadFormatOption = "auto",
    dtype: opt.DtypeOption = None,
    quant_type: opt.QuantTypeOption = None,
    kv_cache_dtype: opt.KVCacheDtypeOption = "auto",
    max_model_len: opt.MaxModelLen = None,
    max_batch_size: opt.MaxNumSeqs = None,
    max_total_token_num: opt.MaxTotalTokenNum = None,
    max_num_batched_tokens: opt.MaxNumBatchedTokens = None,
    page_size: opt.PageSize = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = 0.9,
    as_json: opt.Json = False,
) -> None:
    """Say what weights, steps and KV cache would take, and how many sequences fit.

    Reads the configuration and the tensors' names, not the weights. Ends with 2 and the values that
    would fit when something does not.
    """
    from swiftjax.sizing import plan_engine

    planned = plan_engine(
        EngineConfig(
            model_path=model,
            load_format=load_format,
            dtype=dtype,
            quantization=opt.quantization(quant_type),
            kv_cache_dtype=kv_cache_dtype,
            max_model_len=max_model_len,
            max_batch_size=max_batch_size,
            max_total_token_num=max_total_token_num,
            max_num_batched_tokens=max_num_batched_tokens,
            page_size=page_size,
            gpu_memory_utilization=gpu_memory_utilization,
        )
    )
    _report(planned, as_json=as_json)


def _report(planned: "PlannedEngine", *, as_json: bool) -> None:
    memory, sizes = planned.memory, planned.sizes
    lengths = [n for n in LENGTHS if n < sizes.max_model_len] + [sizes.max_model_len]
    fits = {n: fitting_sequences(memory, n, sizes.max_num_seqs) for n in lengths}
    facts: dict[str, Any] = {
        "dtype": planned.model.dtype,
        "max_model_len": sizes.max_model_len,
        "max_batch_size": sizes.max_num_seqs,
        "max_num_batched_tokens": sizes.max_num_batched_tokens,
        "max_total_token_num": memory.num_pages * memory.page_size,
        "kv_bytes_per_token": memory.page_bytes // memory.page_size,
    }
    if as_json:
        sizes_of = {name: getattr(memory, name) for name in memory.__slots__}
        print(json.dumps({**facts, **sizes_of, "sequences_by_length": fits}))
        return
    print(memory.table())
    for name, value in facts.items():
        print(f"  {name:24} {value}")
    for length, count in fits.items():
        share = length * facts["kv_bytes_per_token"] / GIB
        print(f"  {count:6} sequences of {length} tokens fit ({share:.3g} GiB each)")
