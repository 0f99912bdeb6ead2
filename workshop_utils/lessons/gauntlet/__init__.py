"""A gauntlet for what claims to find silent bugs: a right trainer, planted bugs, right variants that look wrong.

| file | what it has |
| --- | --- |
| `model` | a small GPT, and what can be chosen about its training |
| `trainer` | that GPT, trained under any composition of `workshop_utils.parallel` |
"""
