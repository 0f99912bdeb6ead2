"""A gauntlet for what claims to find silent bugs: a right trainer, planted bugs, right variants that look wrong.

| file | what it has |
| --- | --- |
| `model` | a small GPT, and what can be chosen about its training |
| `trainer` | that GPT, trained under any composition of `workshop_utils.parallel` |
| `bugs.yaml` | bugs: the loss falls, and the mathematics is wrong |
| `variants.yaml` | changes that look wrong and are right |
| `planting` | plants a row of these files for the length of a block |
| `pytorch_script` | a training script of PyTorch alone, with a bug of its own |
"""
