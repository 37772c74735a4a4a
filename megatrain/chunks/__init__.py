"""The chunks of the model that one rank holds, and the input that they take."""
