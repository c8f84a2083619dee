"""``segcal doctor --gpu``: checks that segcal works on a GPU, and what it costs there.

``checking`` runs the parts of the check one after the other, each in a process of its own
(``part``), since a process in which a kernel fails can no longer use the GPU. A part writes each
result as soon as it is known, so that results survive if it is stopped.
"""
