"""Fine-tuning of transformers models, under any layout: settings, recipes, adapters, the run.

    from shardfold.tools.tune import Adapter, SFTConfig, tune

    result = tune(SFTConfig(model="base/", data="chats.jsonl", adapter=Adapter(rank=16)))

adapters          what is trained instead of all parameters: peft's LoRA and prefix, the last layers, or new blocks
config            the settings of the tuning recipes: model, data, adapter, base, text, and the run around them
data              from files to windows of tokens
demo_config       the settings of `shardfold tune demo`
distill           distillation: each target learns the whole distribution of a teacher
dpo               direct preference optimization: of two answers the better one gains
eval_config       the settings of `shardfold eval`
evaluate          what a model has learned, in figures: `shardfold eval`
grpo              group relative policy optimization: answers to one prompt are compared with each other
kto               Kahneman-Tversky optimization: answers are good or bad, each by itself
llamafactory      LLaMA-Factory's YAML as settings: every key is taken, noted or refused
lm_eval_model     a model for lm-evaluation-harness, where that is installed
log_probs         log-probabilities of samples, as losses over pairs and labels need them
merge             an adapter of peft merged into its base: in fp32, one layer at a time, rounded once
models            from a folder to a model without memory, and to its values, which are read one tensor at a time
orpo              odds-ratio preference optimization
ppo               proximal policy optimization: a second model tells what an answer is going to be worth
reference         what the model said before it was tuned, without a second model
reward            a reward model: one number for an answer, larger for the better of two
rewards           what rates an answer
rollouts          answers of the model that trains, what they are worth, and batches of them
run               one tuning: the engine, the data, the run folder, and how far it is
sft               supervised fine-tuning, and pre-training: the mean cross-entropy of all targets
tune_demo         a small model tuned by one recipe after the other: `shardfold tune demo`, `make tune`
tuned             a tuning from its settings to what it leaves behind
tuning_plan       what a tuning takes, before anything runs: the model as a plan sees it, and the largest micro-batch
_answers          what generated answers are held to: a reference's words, the number that a solution ends with
_dataset_info     what LLaMA-Factory's ``dataset_info.json`` says of files of rows, as sources
_demo_base        what the demo begins with: text, a tokenizer of its words, and a small LLaMA with random values
_demo_page        the page of the demo: what each recipe did, in figures, curves and answers
_demo_text        the text of the demo: little stories from templates and lists of words
_divergences      how far two distributions are apart, as distillation has it
_eval_rows        rows as an evaluation takes them: to score, to answer, to choose
_generated        answers that a model gives to the prompts of an evaluation, and what they are held to
_likelihoods      from rows to the tokens that are scored, and from scores to loss, bits per byte and accuracy
_loftq            LoftQ: a rounded weight and two small matrices that together are near the weight
_model_config     transformers' config of the model that a tuning trains
_named_optimizer  the optimizer and the schedule that a tuning's settings name
_noise            noise on embeddings while a model is tuned: NEFTune
_scoring          how likely a model finds given tokens
_written          what a tuning leaves behind that others read: an adapter in peft's format, or a folder of transformers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from shardfold.tools.tune.config import (
    Adapter,
    Base,
    DistillConfig,
    DPOConfig,
    GRPOConfig,
    KTOConfig,
    ORPOConfig,
    PPOConfig,
    PTConfig,
    RewardConfig,
    SFTConfig,
    Source,
    Text,
    TuneConfig,
)

if TYPE_CHECKING:
    from shardfold.tools.tune.tuned import TuneResult, tune

__all__ = [
    "Adapter",
    "Base",
    "DPOConfig",
    "DistillConfig",
    "GRPOConfig",
    "KTOConfig",
    "ORPOConfig",
    "PPOConfig",
    "PTConfig",
    "RewardConfig",
    "SFTConfig",
    "Source",
    "Text",
    "TuneConfig",
    "TuneResult",
    "tune",
]


def __getattr__(name: str) -> Any:
    """What needs torch is imported when it is first asked for."""
    if name in ("TuneResult", "tune"):
        from shardfold.tools.tune import tuned

        return getattr(tuned, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
