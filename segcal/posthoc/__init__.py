"""Post-hoc calibration: the logits of a finished model are corrected by means of held-out cases.

Fit a calibrator to logits and labels of cases that the network was not trained on, apply it to the
logits of other cases, and keep its state as JSON:

>>> import json, torch
>>> from segcal.posthoc.class_region import ClassRegionTemperature
>>> def case(seed):  # of a network whose logits are four times too large
...     drawn = torch.Generator().manual_seed(seed)
...     logits = torch.randn((1, 3, 16, 16, 8), generator=drawn)
...     noise = torch.empty_like(logits).exponential_(generator=drawn)
...     labels = (logits - noise.log()).argmax(1)  # drawn from softmax(logits)
...     return 4 * logits, labels  # (1, K, *S) and (1, *S)
>>> calibrator = ClassRegionTemperature().fit([case(0), case(1), case(2)])
>>> round(calibrator.global_temperature)
4
>>> calibrator.facts["nll_after"] < calibrator.facts["nll_before"]
True
>>> state = json.dumps(calibrator.state())  # numbers and lists, no pickle
>>> again = ClassRegionTemperature.from_state(json.loads(state))
>>> logits, labels = case(3)
>>> probs = again.apply(logits)  # (1, 3, 16, 16, 8), sums to 1 over the classes
>>> torch.equal(probs.argmax(1), logits.argmax(1))  # temperatures change no prediction
True

A case may have a voxel size (:class:`segcal.posthoc.calibrator.HeldOut`). ``ignore_index`` of
:meth:`segcal.posthoc.calibrator.Calibrator.fit` leaves voxels out, and ``per_channel=True`` is for
regions that overlap, or labels of which a sample may have several. Every method is used in these
three steps, and ``segcal methods`` lists the methods.
"""
