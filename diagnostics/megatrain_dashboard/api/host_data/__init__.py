"""The data of a host: waits of its ranks, its data loader, the producers of pictures that it asks, replaced samples."""
