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


def check_correction_hooks() -> None:
    import pkgutil

    from agentflow.engine.sglang import cpu_attention
    from agentflow.engine.sglang.correction import hooks

    for target in {*hooks.hooks(), cpu_attention.EXTEND, cpu_attention.DECODE}:
        assert callable(pkgutil.resolve_name(target)), target


def check_correction_rows() -> None:
    """A batch can be copied with other rows, and attention writes the new KV before it reads the pool."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    assert {
        "reqs", "input_ids", "prefill_input_ids_cpu", "out_cache_loc", "req_pool_indices", "req_pool_indices_cpu",
        "prefix_lens", "extend_lens", "extend_num_tokens", "seq_lens", "seq_lens_cpu", "seq_lens_sum",
        "orig_seq_lens", "extend_logprob_start_lens", "multimodal_inputs", "sampling_info", "has_grammar",
        "spec_info", "decoding_reqs", "return_logprob", "return_hidden_states",
    } <= {f.name for f in dataclasses.fields(ScheduleBatch)}  # fmt: skip
    assert {"capture_hidden_mode", "return_hidden_states_before_norm"} <= parameters(ForwardBatch.init_new)
    extend = inspect.getsource(TorchNativeAttnBackend.forward_extend)
    assert extend.index("set_kv_buffer") < extend.index("_run_sdpa_forward_extend")
    given = list(inspect.signature(TorchNativeAttnBackend._run_sdpa_forward_extend).parameters)
    assert given[1:11] == [
        "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens",
        "extend_prefix_lens", "extend_seq_lens", "encoder_lens",
    ]  # fmt: skip
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    extend = inspect.getsource(TritonAttnBackend.forward_extend)
    assert extend.index("set_kv_buffer") < extend.index("extend_attention_fwd")


def check_cpu_attention() -> None:
    """Ours gives what SGLang's own gives, for prompts, prefixes and several rows of one request."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from agentflow.engine.sglang.cpu_attention import extend_attention

    torch.manual_seed(0)
    slots = torch.randperm(400)
    keys, values = torch.randn(400, 2, 16), torch.randn(400, 2, 16)
    table = slots.reshape(4, 100).int()
    few = [(0, 0, 40), (1, 90, 95), (2, 10, 90), (3, 5, 9), (3, 50, 60), (3, 99, 100)]
    many = [(3, n, n + 2) for n in range(0, 40, 4)] + [(3, 60, 100)]
    original = getattr(TorchNativeAttnBackend._run_sdpa_forward_extend, "__wrapped__", None)
    original = original or TorchNativeAttnBackend._run_sdpa_forward_extend
    for rows in (few, many, few[:1], few[3:]):
        requests, prefixes, lengths = (torch.tensor(list(x)) for x in zip(*rows, strict=True))
        new = lengths - prefixes
        query = torch.randn(int(new.sum()), 4, 16)
        given = (keys, values, table, requests, lengths, prefixes, new, None)
        more: dict[str, Any] = {"scaling": 0.25, "enable_gqa": True, "causal": True}
        wanted = original(None, query, torch.empty_like(query), *given, **more)
        found = extend_attention(original, None, query, torch.empty_like(query), *given, **more)
        assert torch.allclose(wanted, found, atol=1e-5), (wanted - found).abs().max()


def check_cpu_decode_attention() -> None:
    """Ours gives bit for bit what SGLang's own gives."""
    import torch
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    from agentflow.engine.sglang.cpu_attention import decode_attention

    torch.manual_seed(0)
    keys, values = torch.randn(400, 2, 16), torch.randn(400, 2, 16)
    table = torch.randperm(400).reshape(4, 100).int()
    requests, lengths = torch.tensor([2, 0, 3]), torch.tensor([100, 1, 37])
    query = torch.randn(3, 4, 16)
    original = getattr(TorchNativeAttnBackend._run_sdpa_forward_decode, "__wrapped__", None)
    original = original or TorchNativeAttnBackend._run_sdpa_forward_decode
    given = (keys, values, table, requests, lengths, None)
    more: dict[str, Any] = {"scaling": 0.25, "enable_gqa": True, "causal": False}
    wanted = original(None, query, torch.empty_like(query), *given, **more)
    assert torch.equal(wanted, decode_attention(original, None, query, torch.empty_like(query), *given, **more))
    assert list(inspect.signature(original).parameters)[1:9] == [
        "query", "output", "k_cache", "v_cache", "req_to_token", "req_pool_indices", "seq_lens", "encoder_lens",
    ]  # fmt: skip


def check_correction_obstacles() -> None:
    """What cannot be corrected is known by its reason."""
    import types

    import torch
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
    from sglang.srt.server_args import ServerArgs

    from agentflow.engine.sglang.correction.pool import obstacle

    llama = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 128}
    arguments = {
        "tp_size": 1, "pp_size": 1, "enable_dp_attention": False, "hicache_storage_backend": None,
        "speculative_algorithm": None, "disaggregation_mode": "null", "enable_mixed_chunk": False,
    }  # fmt: skip
    known = parameters(ServerArgs) | set(getattr(ServerArgs, "__struct_fields__", ()))
    assert arguments.keys() <= known, arguments.keys() - known

    def reason(
        *, page: int = 1, backend: str = "triton", kind: Any = MHATokenToKVPool, config: Any = (), **more: Any
    ) -> Any:
        pool = object.__new__(kind)
        pool.dtype = pool.store_dtype = torch.float32
        if more.pop("quantised", False):
            pool.store_dtype = torch.uint8
        space = types.SimpleNamespace
        return obstacle(
            space(
                server_args=space(**{**arguments, **more}),
                page_size=page,
                token_to_kv_pool_allocator=space(get_kvcache=lambda: pool),
                tp_worker=space(model_runner=space(prefill_attention_backend_str=backend)),
                model_config=space(hf_config={**llama, **dict(config)}),
            )
        )

    assert reason() is None
    assert reason(backend="torch_native") is None
    assert reason(tp_size=2) == "tensor parallelism"
    assert reason(page=16) == "pages of more than one token"
    assert reason(backend="flashinfer") == "the attention backend flashinfer"
    assert reason(hicache_storage_backend="file") == "a storage tier below the host"
    assert reason(speculative_algorithm="EAGLE") == "speculative decoding"
    assert "MLATokenToKVPool" in reason(kind=MLATokenToKVPool)
    assert "uint8" in reason(quantised=True)
    assert "sliding window" in reason(config={"sliding_window": 64, "model_type": "mistral"})
    assert "rotary" in reason(config={"model_type": "unheard_of"})


def check_correction_pool_and_tree() -> None:
    from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchResult
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
    from sglang.srt.mem_cache.radix_cache import RadixKey

    source = inspect.getsource(MHATokenToKVPool)
    assert all(name in source for name in ("self.k_buffer", "self.v_buffer", "store_dtype"))
    assert callable(RadixKey.child_key_at)
    fields = {f.name for f in dataclasses.fields(InsertParams)}
    assert {"key", "value", "prev_prefix_len", "inserted_len"} <= fields
    names = set(getattr(MatchResult, "_fields", ())) | set(vars(MatchResult))
    assert {"device_prefix_len", "host_hit_length", "best_match_node"} <= names, names


def check_correction_requests_of_ours() -> None:
    """A request that the scheduler makes for itself is sent to nobody and leaves no KV."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.idle_sleeper import IdleSleeper
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache

    assert "skip_radix_cache_insert" in inspect.getsource(Req.__init__)
    assert "skip_radix_cache_insert" in inspect.getsource(checkpoint_kv_cache)
    assert "skip_radix_cache_insert" in inspect.getsource(release_kv_cache)
    streaming = inspect.getsource(SchedulerOutputStreamer._stream_output_generation)
    assert "req.finished() and req.finished_output" in streaming
    assert callable(Scheduler.is_fully_idle)
    assert "self.poller" in inspect.getsource(IdleSleeper.__init__)


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


def check_radix_registry() -> None:
    from sglang.srt.mem_cache import registry
    from sglang.srt.mem_cache.unified_cache import tree_core_registry

    from agentflow.engine.sglang import plugin
    from agentflow.engine.sglang.radix_cache import BACKEND

    plugin.register()
    assert BACKEND in registry.registered_radix_cache_backends()
    assert "cache_class" in parameters(registry.create_unified_radix_cache)
    assert parameters(tree_core_registry.register_tree_core_backend) == {"name", "factory"}


def check_radix_cache_methods() -> None:
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    assert {"req", "up_to"} <= parameters(UnifiedRadixCache.checkpoint_into_tree)
    assert {"node_id", "mem_quota"} <= parameters(UnifiedRadixCache.load_back)
    assert parameters(UnifiedRadixCache.init_load_back) == {"self", "params"}
    for name in (
        "reset", "insert", "inc_lock_ref", "evictable_size", "protected_size", "sanity_check",
        "ready_to_load_host_cache", "has_free_load_back_slot", "is_load_back_event_done", "_evict_device_leaf",
    ):  # fmt: skip
        assert callable(getattr(UnifiedRadixCache, name)), name


def check_tree_core_methods() -> None:
    from sglang.srt.mem_cache.unified_cache.unified_tree_core import UnifiedTreeCore, UnifiedTreeNode

    assert parameters(UnifiedTreeCore._split_node) == {"self", "key", "child", "split_len"}
    assert {"parent", "key", "value"} <= parameters(UnifiedTreeCore._add_new_node)
    assert parameters(UnifiedTreeCore.evict_device_leaf) == {"self", "node_id", "is_write_back"}
    assert {"node", "tracker"} <= parameters(UnifiedTreeCore._evict_host_leaf)
    for name in ("reset", "demote", "drop_subtree_no_host", "commit_load_back", "node_by_id"):
        assert callable(getattr(UnifiedTreeCore, name)), name
    source = inspect.getsource(UnifiedTreeCore.reset)
    for name in ("_node_arena", "root_node", "evictable_device_leaves", "evictable_host_leaves"):
        assert name in source, name
    node = inspect.getsource(UnifiedTreeNode.__init__)
    for name in ("self.id", "self.key", "self.parent", "self.last_access_time"):
        assert name in node, name
    assert isinstance(UnifiedTreeNode.evicted, property)
    assert isinstance(UnifiedTreeNode.backuped, property)


def check_eviction_walk() -> None:
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_cache.components.full import FullComponent
    from sglang.srt.mem_cache.unified_radix_cache import COMPONENT_REGISTRY

    assert COMPONENT_REGISTRY[ComponentType.FULL] is FullComponent
    assert parameters(FullComponent._evict_device_start) == {"self", "request_cnt"}
    assert {"tracker"} <= parameters(FullComponent._evict_device_next_node)
    assert {"num_tokens", "tracker", "device_frees", "host_frees", "cache_actions"} <= parameters(
        FullComponent.drive_host_eviction
    )
    assert parameters(FullComponent._evict_device_end) == {"self"}
    walk = inspect.getsource(FullComponent)
    for name in ("_evict_device_request_cnt", "_evict_device_last_node", "_evict_device_heap"):
        assert name in walk, name


def check_radix_key() -> None:
    from array import array

    from sglang.srt.mem_cache.radix_cache import RadixKey

    key = RadixKey(array("q", [1, 2, 3]), extra_key="x", cache_salt="y")
    assert (key.extra_key, key.cache_salt, list(key.raw_token_ids()), len(key)) == ("x", "y", [1, 2, 3], 3)


def check_scheduler_hooks() -> None:
    import pkgutil

    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from agentflow.engine.sglang import http, scheduler

    assert HookType.AROUND
    assert callable(HookRegistry.register)
    for target in {**scheduler.hooks(), **http.hooks()}:
        assert callable(pkgutil.resolve_name(target)), target


def check_scheduler_state() -> None:
    from sglang.srt.managers.scheduler import Scheduler

    source = inspect.getsource(sys.modules[Scheduler.__module__])
    for name in (
        "self.tree_cache", "self.waiting_queue", "self.running_batch", "self.max_total_num_tokens",
        "self.token_to_kv_pool_allocator", "self.chunked_req", "ipc_channels.send_to_tokenizer",
        "self.max_req_len - input_len - 1", ">= self.max_req_input_len",
    ):  # fmt: skip
        assert name in source, name
    assert callable(Scheduler.flush_cache)
    assert callable(Scheduler.is_fully_idle)
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    # What is preempted, a ratio, and what is given up.
    assert "-> Tuple[List[Req], float, List[Req]]" in inspect.getsource(ScheduleBatch.retract_decode)


def check_request_fields() -> None:
    from sglang.srt.managers.schedule_batch import Req

    source = inspect.getsource(Req.__init__)
    for name in (
        "rid", "kv_hints", "origin_input_ids", "output_ids", "customized_info", "last_node", "cached_tokens",
        "num_matched_prefix_tokens", "is_retracted",
    ):  # fmt: skip
        assert f"self.{name}" in source, name


def check_control_requests() -> None:
    from sglang.srt.managers.io_struct import DumperControlReqInput, DumperControlReqOutput

    sent = DumperControlReqInput(method="m", body={"a": 1})
    assert (sent.method, sent.body) == ("m", {"a": 1})
    back = DumperControlReqOutput(success=True, response=[{"b": 2}])
    assert (back.success, back.response, back.error) == (True, [{"b": 2}], "")


def check_kv_hints() -> None:
    from sglang.srt.managers.kv_hints import decode_kv_hints_envelope

    from agentflow.engine.base import Call
    from agentflow.engine.sglang import wire

    envelope = decode_kv_hints_envelope(wire.hints(Call(token_ids=[1]), []))
    assert [a.action_type for a in envelope.actions] == [wire.CALL_ACTION]


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


def check_load_acknowledgements() -> None:
    from sglang.srt.managers.cache_controller import HiCacheAck
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    assert {"start_event", "finish_event", "num_tokens", "timing_enabled"} <= set(HiCacheAck._fields)
    assert "finish_count" in parameters(UnifiedRadixCache.loading_check)


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


def check_warm_ups() -> None:
    """What a request of our own needs, and who would be told of its answer."""
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
    from sglang.srt.mem_cache.radix_cache import RadixKey
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats
    from sglang.srt.sampling.sampling_params import SamplingParams

    assert "recv_req" in parameters(Scheduler.handle_generate_request)
    assert {"reqs", "return_logprob"} <= parameters(SchedulerOutputStreamer.stream_output)
    wanted = {"rid", "input_ids", "input_text", "sampling_params", "stream", "time_stats", "mm_inputs"}
    assert wanted <= parameters(TokenizedGenerateReqInput), parameters(TokenizedGenerateReqInput)
    assert {"lora_id", "extra_key", "origin_input_ids"} <= parameters(Req.__init__)
    assert {"offset", "page_size"} <= parameters(RadixKey.child_key_at)
    assert "tokenizer" in parameters(SamplingParams.normalize)
    assert APIServerReqTimeStats()


def check_holding_calls_back() -> None:
    from sglang.srt.managers.schedule_policy import SchedulePolicy
    from sglang.srt.managers.scheduler import Scheduler

    assert list(inspect.signature(SchedulePolicy.calc_priority).parameters)[1:3] == ["waiting_queue", "running_batch"]
    source = inspect.getsource(Scheduler)
    assert "self.policy.calc_priority(" in source
    assert "self.waiting_queue = " in source


def check_adapters() -> None:
    from importlib import import_module

    from sglang.srt.lora.lora_manager import LoRAManager
    from sglang.srt.lora.mem_pool import LoRAMemoryPool

    from agentflow.engine.sglang import lora_cpu

    assert {"new_loras", "running_loras"} <= parameters(LoRAManager.fetch_new_loras)
    assert "lora_ids" in parameters(LoRAManager.validate_lora_batch)
    source = inspect.getsource(LoRAManager)
    assert all(f"self.{name}" in source for name in ("loras", "lora_refs", "memory_pool"))
    assert "uid_to_buffer_id" in inspect.getsource(LoRAMemoryPool)
    for name in lora_cpu.MODULES:
        assert "pin_memory" in inspect.getsource(import_module(name))  # else there is nothing to put right


results: dict[str, str] = {}
for name, check in sorted(dict(globals()).items()):
    if name.startswith("check_"):
        try:
            check()
            results[name] = "ok"
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
print("RESULTS " + json.dumps(results))  # noqa: T201
