"""Events as columns: what is streamed, stored and analysed. numpy only, so that the analyses need nothing else."""
