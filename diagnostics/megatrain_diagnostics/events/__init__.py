"""Events as columns, for streams, store and analyses. Needs only numpy, so that the analyses need nothing else."""
