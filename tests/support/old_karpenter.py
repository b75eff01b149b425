"""Karpenter's kinds of before v1, as its users wrote them for GPUs."""

PROVISIONERS = """
apiVersion: karpenter.sh/v1alpha5
kind: Provisioner
metadata:
  name: gpu-training
spec:
  requirements:
    - {key: karpenter.sh/capacity-type, operator: In, values: [spot, on-demand]}
    - {key: node.kubernetes.io/instance-type, operator: In, values: [p4d.24xlarge, g5.48xlarge]}
    - {key: kubernetes.io/arch, operator: In, values: [amd64]}
    - {key: karpenter.k8s.aws/instance-gpu-name, operator: In, values: [a100, a10g]}
  limits:
    resources: {nvidia.com/gpu: 64}
  labels: {workload-type: training}
  taints:
    - {key: nvidia.com/gpu, value: "true", effect: NoSchedule}
  kubeletConfiguration: {maxPods: 60, containerRuntime: containerd}
  ttlSecondsAfterEmpty: 300
  ttlSecondsUntilExpired: 2592000
  weight: 10
  providerRef: {name: gpu}
---
apiVersion: karpenter.sh/v1alpha5
kind: Provisioner
metadata:
  name: gpu-inference
spec:
  requirements:
    - {key: karpenter.k8s.aws/instance-gpu-name, operator: In, values: [t4]}
  limits:
    resources: {nvidia.com/gpu: 10}
  consolidation: {enabled: true}
  annotations: {karpenter.sh/do-not-consolidate: "true"}
  provider:
    apiVersion: extensions.karpenter.sh/v1alpha1
    kind: AWS
    instanceProfile: KarpenterNodes
    subnetSelector: {aws-ids: "subnet-0aaaaaaaaaaaaaaaa, subnet-0bbbbbbbbbbbbbbbb"}
    securityGroupSelector: {"aws::name": gpu-nodes}
---
apiVersion: karpenter.k8s.aws/v1alpha1
kind: AWSNodeTemplate
metadata:
  name: gpu
spec:
  amiFamily: AL2
  subnetSelector: {karpenter.sh/discovery: gpu-cluster, tier: ""}
  securityGroupSelector: {karpenter.sh/discovery: gpu-cluster}
  userData: |
    #!/bin/bash
    nvidia-smi -pm 1
  blockDeviceMappings:
    - deviceName: /dev/xvda
      virtualName: ephemeral0
      ebs: {volumeSize: 100Gi, volumeType: gp3, encrypted: true, deleteOnTermination: true}
  metadataOptions: {httpEndpoint: enabled, httpTokens: required, httpPutResponseHopLimit: 2}
  tags: {team: ml, kubernetes.io/cluster/gpu-cluster: owned}
"""
