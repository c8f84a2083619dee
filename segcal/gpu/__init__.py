"""``segcal doctor --gpu``: whether segcal works on a GPU, and what it costs there.

``checking`` runs parts one after the other, each in a process of its own, since a kernel that fails
leaves its process without a GPU; ``part`` is that process. What a part finds is written as soon as
it is known, so that one that is stopped has not run in vain.
"""
