"""Sampler actors on any nodes: they draw the rollouts of coming steps while the trainer trains.

    actor.py             an actor: a native sampler over weights that it is sent
    dispatch.py          gives batches of requests to actors, and replaces actors that end
    pinned_sampler.py    a Sampler over the actors, for the weights of one version
    on_ray.py            the actors of a Ray cluster

A batch carries everything that decides a bit: its requests (ids, key, settings, limits), and which weights
they are drawn with. So the number, the place, the speed and the death of actors decide nothing.
"""
