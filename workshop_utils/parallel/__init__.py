"""Ways to split the training of a `torch.nn.Module` among ranks, written to be read: each equals one process.

| module | what is split |
| --- | --- |
| `data` | the batch: gradients travel, naively, then in buckets, then during the backward pass |
| `sharded` | the batch, and the optimizer's state: ZeRO-1 |
| `fully_sharded` | the gradients and the parameters, too: ZeRO-2 and -3, as FSDP2 |
| `tensor` | every layer, between ranks that work on the same batch: Megatron's cuts, sequence parallelism |
| `schedule`, `pipeline`, `deferred` | the layers, into stages that microbatches go through: from GPipe to ZBV |
| `context` | the tokens of each sequence: ring attention, Ulysses |
| `experts` | the MLPs of which a token uses a few: it goes where these are |
| `mesh` | all of these at once: data × tensor × pipeline × context, experts across data × context |
| `verify`, `diagnosis`, `reference` | nothing: is a training, ours or PyTorch's, still that of one process? |

All of them speak through a `comm.Communicator`, so every byte is counted.
"""
