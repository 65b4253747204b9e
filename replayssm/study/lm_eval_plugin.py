"""How plain `lm_eval run --model replayssm` finds the model.

Owns one registration. lm-eval up to 0.4.13 loads no installed models (the entry point
`lm_eval.models` is for versions that do), but it imports torch, and torch calls what is installed
under `torch.backends` when it is imported. Must import nothing else: every process that imports
torch beside this package comes here.
"""

import sys


def register() -> None:
    """Tell lm-eval where the model is, by name; outside of lm-eval do nothing.

    A program that imports torch before lm-eval imports `replayssm.study.lm_eval_model` itself.
    """
    if "lm_eval" not in sys.modules:
        return
    from lm_eval.api.registry import model_registry

    model_registry.register("replayssm", target="replayssm.study.lm_eval_model:ReplayLM")
