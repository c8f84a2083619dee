"""Cross-entropy, soft Dice, mL1-ACE and a penalty on logits together in one sweep over the voxels.

A sweep computes values and gradient. ``terms`` says what can be swept, ``fused`` is the
differentiable function.

On CPUs, ``cpu`` hands a sweep to loops that Numba compiles: ``labels_loops`` reads the labels;
``sums_loops`` with ``bins_loops`` makes the pass for losses of sums; ``loops``, or
``confidence_loops`` for the penalty on log-odds, makes the pass that writes the gradient. What they
share is in ``stretches``, ``vector_math`` and ``sharing``. On GPUs, ``cuda`` and
``confidence_kernel`` are the kernels, in Triton, without losses of sums; ``labels_kernel`` reads
the labels.
"""
