"""The verbs that the launcher adds to the `megatrain` command, one module each; verbs that only read or ask load no
torch.
"""
