"""What all answers are made of: bytes with a tag, refusals, the parameters of questions, arrays, downloads."""
