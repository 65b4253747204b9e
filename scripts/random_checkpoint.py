"""Write a checkpoint of a published size with random weights: the machinery without the weights.

Owns nothing but the folder it writes: weights of `replayssm.models.random_weights`, and the
tokenizer of the built-in models. What such a model computes means nothing.

    python scripts/random_checkpoint.py random/qwen3.5-4b FOLDER --device cuda
    replayssm run experiments/kl_drift_qwen3.5-4b.yaml --models FOLDER --prompts 1
"""

import argparse

import replayssm.models
from replayssm.models.random_weights import CONFIGURATIONS, random_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=sorted(CONFIGURATIONS))
    parser.add_argument("folder")
    parser.add_argument("--device", default="cpu", help="where weights are drawn (cpu)")
    arguments = parser.parse_args()
    random_model(arguments.name, device=arguments.device).model.save_pretrained(arguments.folder)
    replayssm.models.load("builtin/gdn").tokenizer.save_pretrained(arguments.folder)
    print(f"Wrote {arguments.folder}")


if __name__ == "__main__":
    main()
