"""Planning: what a job will hold and do, before it runs. Memory of every rank, and the layout without the machines."""
