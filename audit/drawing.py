"""The prompts of an audit, and the completions that its sampler draws."""

from ..engine.rollout.types import GenerationParams
from ..engine.tasks.tokenizer import Tokenizer
from ..files.inputs import read_text
from .compare import Rollouts
from .config import AuditConfig
from .engines.engine import Engine

# What is drawn without --prompts, in words.
SUMS = "sums such as 3+14="


def draw(cfg: AuditConfig, sampler: Engine, tokenizer: Tokenizer, context: int) -> Rollouts:
    """cfg.n completions of the prompts, in turn. Raises ValueError for prompts that cannot be used.

    context: tokens of a sequence at most.
    """
    prompts, max_tokens = requests(cfg, tokenizer, context)
    generation_params = GenerationParams(cfg.sampling_params.check(), 1, max_tokens, tokenizer.stop_ids)
    repeated = [prompts[i % len(prompts)] for i in range(cfg.n)]
    return [(r, cfg.sampling_params) for r in sampler.generate(repeated, generation_params, cfg.seed)]


def requests(cfg: AuditConfig, tokenizer: Tokenizer, context: int) -> tuple[list[list[int]], int]:
    """The prompts, and the tokens that may follow the longest. Raises ValueError where none may."""
    prompts = [tokenizer.encode(p, cfg.chat) for p in _prompt_texts(cfg.prompts)]
    room = context - max(map(len, prompts))
    if room < 1:
        raise ValueError(
            f"audit: a prompt of {context - room} tokens leaves no room in the context ({context})"
        )
    return prompts, min(cfg.max_tokens, room)


def _prompt_texts(file: str) -> list[str]:
    if not file:
        return [f"{a}+{b}=" for a in range(1, 9) for b in range(11, 19)]
    try:
        lines = read_text(file, stream=True).split("\n")
    except OSError as error:
        raise ValueError(f"audit: {file} cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ValueError(f"audit: {file} {error}") from None
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ValueError(f"audit: {file} holds no prompt")
    return texts
