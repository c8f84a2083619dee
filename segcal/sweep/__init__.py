"""Cross-entropy and a penalty on logits in one sweep over the voxels: values and gradient.

``terms`` says what can be swept, ``fused`` is the differentiable function, ``cpu`` and ``cuda`` are
the compiled loops.
"""
