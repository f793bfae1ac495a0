"""Pipeline parallelism: each rank of mesh.pp holds some of the decoder layers.

Read in this order: schedule.py assigns stages to ranks, and defines the order of forwards and backwards. model.py
reduces a model to a rank's stages. communication.py sends hidden states and gradients between ranks.
weight_gradients.py delays gradients of weights (zero bubble). engine/pipeline_executor.py runs a step.
"""
