"""What agentflow relies on in SGLang, one check each, told as JSON: name -> "ok" or what is wrong.

It runs in a process of its own, because importing SGLang changes the process (event-loop policy, warnings).
Add a function named ``check_...`` for every symbol that new code relies on.
"""

import dataclasses
import inspect
import json
import sys
from typing import Any


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


def check_version() -> None:
    import sglang

    assert sglang.__version__ == "0.5.23", sglang.__version__


def check_platform_entry_point() -> None:
    from sglang.srt.platforms import current_platform

    from agentflow.engine.sglang import cpu_platform

    assert cpu_platform.activate() is None or current_platform.is_out_of_tree()


def check_platform_bases() -> None:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

    from agentflow.engine.sglang.cpu_platform import PortableCpuPlatform

    platform = PortableCpuPlatform()
    assert isinstance(platform, SRTPlatform)
    assert isinstance(platform, CpuDeviceMixin)
    assert platform.get_device_total_memory() > 0  # the mixin's, not the interface's stub
    assert not PlatformCapabilities().supports_triton


def check_server_arguments() -> None:
    from sglang.srt.server_args import ServerArgs

    from agentflow.engine.sglang.arguments import ServerOptions, server_arguments

    known = parameters(ServerArgs) | set(getattr(ServerArgs, "__struct_fields__", ()))
    for cpu in (True, False):
        wanted = server_arguments(ServerOptions(model_path="m", max_total_tokens=1, context_length=1), cpu=cpu)
        assert wanted.keys() <= known, wanted.keys() - known


def check_generate_request() -> None:
    from sglang.srt.managers.io_struct import GenerateReqInput

    fields = (
        {f.name for f in dataclasses.fields(GenerateReqInput)}
        if dataclasses.is_dataclass(GenerateReqInput)
        else (set(GenerateReqInput.__struct_fields__))
    )
    assert {"rid", "input_ids", "sampling_params", "stream", "kv_hints", "custom_logit_processor"} <= fields


def check_tokenizer_manager() -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    assert {"rid", "abort_all"} <= parameters(TokenizerManager.abort_request)
    assert inspect.isasyncgenfunction(TokenizerManager.generate_request)
    assert callable(TokenizerManager.auto_create_handle_loop)
    source = inspect.getsource(TokenizerManager)
    for name in ("rid_to_state", "context_len", "_subprocess_watchdog"):
        assert name in source, name


def check_engine_hooks() -> None:
    from sglang.srt.entrypoints.engine import Engine

    assert callable(Engine.run_scheduler_process_func)
    assert callable(Engine.run_detokenizer_process_func)
    assert "set_start_method" in inspect.getsource(sys.modules[Engine.__module__]._set_envs_and_config)
    assert {"server_args", "port_args"} <= parameters(Engine._launch_scheduler_processes)
    assert {"server_args", "port_args"} <= parameters(Engine._launch_detokenizer_subprocesses)


def check_plugins_may_load_again_in_a_forked_child() -> None:
    from sglang.srt import plugins

    assert isinstance(plugins._plugins_loaded, bool)


def check_hicache_parts() -> None:
    import torch
    from sglang.srt.mem_cache.pool_host import common, mha

    from agentflow.engine.sglang import cpu_platform, hicache_cpu

    if cpu_platform.activate() is None:
        return
    assert hicache_cpu.install()
    host = common.ALLOC_MEMORY_FUNCS["cpu"](
        (2, 3), dtype=torch.float32, device="cpu", pin_memory=True, allocator=None, registration_granularity_bytes=None
    )
    assert host.shape == (2, 3)
    source, target = [torch.arange(8.0).reshape(4, 2)], [torch.zeros(4, 2)]
    mha.transfer_kv_direct(
        src_layers=source,
        dst_layers=target,
        src_indices=torch.tensor([3, 0]),
        dst_indices=torch.tensor([1, 2]),
        page_size=1,
    )
    assert target[0].tolist() == [[0, 0], [6, 7], [0, 1], [0, 0]]
    stream = torch.cpu.Stream()
    stream.synchronize()
    assert stream.query()


def check_forced_tokens() -> None:
    import types

    import torch
    from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

    from agentflow.engine.sglang.forced import PARAMETER, forced_tokens_processor

    processor = CustomLogitProcessor.from_str(forced_tokens_processor())
    rows = [
        {PARAMETER: [3, 1], "__req__": types.SimpleNamespace(output_ids=[3])},
        {PARAMETER: [3], "__req__": types.SimpleNamespace(output_ids=[3])},
    ]
    logits = processor(torch.tensor([[0.0, 0.0, 0.0, 9.0]] * 2), rows)
    assert logits.argmax(dim=1).tolist() == [1, 3]  # the second row is used up


def check_seeds() -> None:
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    from agentflow.engine.sglang import cpu_platform, seeds

    if cpu_platform.activate() is None:
        return
    assert seeds.install()
    assert {"batch", "vocab_size"} == parameters(SamplingBatchInfo.from_schedule_batch)
    assert SamplingBatchInfo.from_schedule_batch.agentflow_seeds
    logprobs = torch.zeros(3, 1000, dtype=torch.float64)
    assert sampler.multinomial_with_seed is seeds.multinomial_with_seed
    assert "multinomial_with_seed(logprobs, sampling_seed, positions)" in inspect.getsource(sampler)
    drawn = sampler.multinomial_with_seed(logprobs, torch.tensor([7, 7, 8]), torch.tensor([5, 5, 5])).view(-1).tolist()
    assert drawn[0] == drawn[1] != drawn[2]


def check_disabled_model_modules() -> None:
    from sglang.srt.environ import envs

    assert hasattr(envs, "SGLANG_DISABLED_MODEL_ARCHS")


results: dict[str, str] = {}
for name, check in sorted(dict(globals()).items()):
    if name.startswith("check_"):
        try:
            check()
            results[name] = "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
print("RESULTS " + json.dumps(results))  # noqa: T201
