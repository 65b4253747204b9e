"""Decode hybrid state-space language models from a checkpoint and a ring of inputs.

The package has no side effects on import and re-exports nothing: import the module you need
(`replayssm.policy`, `replayssm.state_update`, ...). Which module may import which is drawn in
CONTRIBUTING.md and enforced by a test.
"""

__version__ = "0.1.0"
