"""One vLLM engine as a program: ``engine.py JOB.json RESULT.npz``.

The job: ``llm`` (arguments of vllm.LLM), ``prompts`` and ``new_tokens`` (full-vocabulary logprobs
of all prompts and of that many greedy tokens), ``windows`` (the given tokens' losses), and
``alone`` (prompts of which only the tokens are wanted, asked one after another: which requests meet
in a batch depends on when they arrive). What was built comes back as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def run(job: dict[str, Any], result: str) -> None:
    """Start, ask, write the answers and end."""
    import numpy as np
    import probe
    from vllm import LLM, SamplingParams

    started = time.monotonic()
    llm: Any = LLM(**job["llm"])
    ready = time.monotonic() - started
    vocabulary = llm.model_config.get_vocab_size()
    size, more = job["new_tokens"], {"temperature": 0.0, "ignore_eos": True, "detokenize": False}

    def ask(prompts: list[list[int]], **sampling: Any) -> list[Any]:
        tokens = [{"prompt_token_ids": prompt} for prompt in prompts]
        found: list[Any] = llm.generate(
            tokens, SamplingParams(flat_logprobs=True, **more, **sampling), use_tqdm=False
        )
        return found

    def table(flat: Any, first: int) -> Any:
        """Rows of logprobs by token; NaN where vLLM gave none."""
        rows = np.full((len(flat) - first, vocabulary), np.nan, np.float32)
        for row in range(first, len(flat)):
            span = slice(flat.start_indices[row], flat.end_indices[row])
            rows[row - first, flat.token_ids[span]] = flat.logprobs[span]
        return rows

    def given(answer: Any) -> Any:
        """The prompt's own tokens' losses; each position has that one token first."""
        flat, tokens = answer.prompt_logprobs, answer.prompt_token_ids
        places = flat.start_indices[1:]
        assert [flat.token_ids[place] for place in places] == list(tokens[1:])
        return -np.array([flat.logprobs[place] for place in places])

    arrays: dict[str, Any] = {}
    answers = ask(job["prompts"], max_tokens=size, logprobs=vocabulary, prompt_logprobs=vocabulary)
    for i, answer in enumerate(answers):
        completion = answer.outputs[0]
        arrays[f"tokens{i}"] = np.array(completion.token_ids)
        arrays[f"logprobs{i}"] = np.concatenate(
            [table(answer.prompt_logprobs, 1), table(completion.logprobs, 0)]
        )
    if job["windows"]:
        answers = ask(job["windows"], max_tokens=1, prompt_logprobs=0)
        arrays["losses"] = np.stack([given(answer) for answer in answers])
    answers = [ask([prompt], max_tokens=size)[0] for prompt in job["alone"]]
    arrays["alone"] = np.array([answer.outputs[0].token_ids for answer in answers])
    counters = {} if job["llm"]["disable_log_stats"] else counted(llm)
    about = {
        **counters,
        "built": llm.apply_model(probe.built),
        "ready_seconds": round(ready, 1),
        "asked_seconds": round(time.monotonic() - started - ready, 1),
    }
    np.savez(result, about=json.dumps(about), **arrays)


def counted(llm: Any) -> dict[str, int]:
    """Of speculative decoding: tokens proposed, and tokens taken."""
    values = {one.name: one.value for one in llm.get_metrics() if hasattr(one, "value")}
    names = {"drafts": "num_draft_tokens", "accepted": "num_accepted_tokens"}
    return {key: values[f"vllm:spec_decode_{name}"] for key, name in names.items()}


if __name__ == "__main__":  # vLLM's processes are spawned: they import this file as well
    with open(sys.argv[1]) as file:
        run(json.load(file), sys.argv[2])
