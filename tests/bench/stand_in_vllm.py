"""vLLM as the benchmarks call it: an `LLM` that notes what it is given, over an engine with `LLMEngine`'s surface."""

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace


class Kind(Enum):
    CUMULATIVE = 0
    DELTA = 1


class Engine:
    """Gives every request `tokens` tokens a step, as vLLM's engine reports them."""

    def __init__(self, tokens=4):
        self.tokens, self.requests = tokens, {}
        self.added, self.usage = [], 0.0
        self.vllm_config = SimpleNamespace(
            cache_config=SimpleNamespace(num_gpu_blocks=622, block_size=1072),
            scheduler_config=SimpleNamespace(async_scheduling=True),
        )
        scheduler = SimpleNamespace(
            kv_cache_manager=self, get_request_counts=lambda: (len(self.requests), 3)
        )  # an engine in the same process is an attribute of its client
        self.engine_core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))

    def add_request(self, request_id, prompt, params):
        assert isinstance(request_id, str)
        assert request_id not in self.requests
        self.added.append((request_id, prompt, params))
        self.requests[request_id] = params["max_tokens"]

    def step(self):
        self.usage = 0.25 * len(self.requests)
        outputs = []
        for name, left in list(self.requests.items()):
            now = min(left, self.tokens)
            self.requests[name] -= now
            output = SimpleNamespace(token_ids=[7] * now)
            outputs.append(SimpleNamespace(request_id=name, outputs=[output], finished=left == now))
            if left == now:
                del self.requests[name]
        return outputs

    def abort_request(self, names):
        for name in names:
            del self.requests[name]


class LLM:
    """Notes its arguments."""

    made: list = []

    def __init__(self, **arguments):
        self.arguments, self.llm_engine = arguments, Engine()
        self.metrics = {"num_preemptions": 2, "spec_decode_num_drafts": 5, "spec_decode_num_accepted_tokens": 9, "other": 1}
        LLM.made.append(self)

    def get_metrics(self):
        return [SimpleNamespace(name=f"vllm:{name}", value=value) for name, value in self.metrics.items()]


def install(monkeypatch):
    """Let `import vllm` find this."""
    LLM.made = []
    modules = {
        "vllm": {"LLM": LLM, "SamplingParams": lambda **options: options},
        "vllm.inputs": {"tokens_input": lambda ids: {"type": "token", "prompt_token_ids": ids}},
        "vllm.sampling_params": {"RequestOutputKind": Kind},
    }
    for name, content in modules.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
