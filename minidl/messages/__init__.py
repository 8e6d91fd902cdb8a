"""The rules by which gradients become messages: which go together, which wait, and where factors travel instead."""
