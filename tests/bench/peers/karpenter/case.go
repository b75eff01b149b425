package main

import (
	"encoding/json"
	"fmt"
	"os"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	v1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/scheduling"
)

const (
	gpuModelLabel = "gpu-autoscaler.io/gpu-model"
	groupLabel    = "group"
	gpuResource   = corev1.ResourceName("nvidia.com/gpu")
	podsPerNode   = 110
)

// amounts is what a pod asks for, or what a node has.
type amounts struct {
	CPUMilli  int64 `json:"cpu_milli"`
	MemoryMiB int64 `json:"memory_mib"`
	GPUs      int64 `json:"gpus"`
}

// benchCase is the file that the bench writes: the same pods, types, prices and nodes for both sides.
type benchCase struct {
	OverheadUSDPerHour float64 `json:"overhead_usd_per_hour"`
	Types              []struct {
		amounts
		Name     string `json:"name"`
		GPUModel string `json:"gpu_model"`
		Offers   []struct {
			Zone         string  `json:"zone"`
			CapacityType string  `json:"capacity_type"`
			USDPerHour   float64 `json:"usd_per_hour"`
		} `json:"offers"`
	} `json:"types"`
	Pods []struct {
		amounts
		Name         string   `json:"name"`
		Zone         string   `json:"zone"`
		CapacityType string   `json:"capacity_type"`
		GPUModels    []string `json:"gpu_models"`
		AntiGroup    string   `json:"anti_group"`
		SpreadGroup  string   `json:"spread_group"`
	} `json:"pods"`
	Nodes []struct {
		amounts
		Name         string `json:"name"`
		Type         string `json:"type"`
		Zone         string `json:"zone"`
		CapacityType string `json:"capacity_type"`
		GPUModel     string `json:"gpu_model"`
	} `json:"nodes"`
}

func read(path string) (*benchCase, error) {
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	found := &benchCase{}
	return found, json.Unmarshal(content, found)
}

func (a amounts) list(pods int64) corev1.ResourceList {
	listed := corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewMilliQuantity(a.CPUMilli, resource.DecimalSI),
		corev1.ResourceMemory: *resource.NewQuantity(a.MemoryMiB<<20, resource.BinarySI),
	}
	if a.GPUs > 0 {
		listed[gpuResource] = *resource.NewQuantity(a.GPUs, resource.DecimalSI)
	}
	if pods > 0 {
		listed[corev1.ResourcePods] = *resource.NewQuantity(pods, resource.DecimalSI)
	}
	return listed
}

// instanceTypes returns the types with their offerings; what a node costs besides its price is in each price.
func (c *benchCase) instanceTypes() []*cloudprovider.InstanceType {
	found := make([]*cloudprovider.InstanceType, 0, len(c.Types))
	for _, each := range c.Types {
		var offerings cloudprovider.Offerings
		var zones, capacityTypes []string
		for _, offer := range each.Offers {
			offerings = append(offerings, &cloudprovider.Offering{
				Available: true,
				Price:     offer.USDPerHour + c.OverheadUSDPerHour,
				Requirements: scheduling.NewLabelRequirements(map[string]string{
					v1.CapacityTypeLabelKey:  offer.CapacityType,
					corev1.LabelTopologyZone: offer.Zone,
				}),
			})
			zones, capacityTypes = append(zones, offer.Zone), append(capacityTypes, offer.CapacityType)
		}
		model := scheduling.NewRequirement(gpuModelLabel, corev1.NodeSelectorOpDoesNotExist)
		if each.GPUModel != "" {
			model = scheduling.NewRequirement(gpuModelLabel, corev1.NodeSelectorOpIn, each.GPUModel)
		}
		found = append(found, &cloudprovider.InstanceType{
			Name:      each.Name,
			Offerings: offerings,
			Capacity:  each.list(podsPerNode),
			Overhead:  &cloudprovider.InstanceTypeOverhead{},
			Requirements: scheduling.NewRequirements(
				scheduling.NewRequirement(corev1.LabelInstanceTypeStable, corev1.NodeSelectorOpIn, each.Name),
				scheduling.NewRequirement(corev1.LabelArchStable, corev1.NodeSelectorOpIn, v1.ArchitectureAmd64),
				scheduling.NewRequirement(corev1.LabelOSStable, corev1.NodeSelectorOpIn, string(corev1.Linux)),
				scheduling.NewRequirement(corev1.LabelTopologyZone, corev1.NodeSelectorOpIn, zones...),
				scheduling.NewRequirement(v1.CapacityTypeLabelKey, corev1.NodeSelectorOpIn, capacityTypes...),
				model,
			),
		})
	}
	return found
}

func (c *benchCase) pods() []*corev1.Pod {
	found := make([]*corev1.Pod, 0, len(c.Pods))
	for _, each := range c.Pods {
		labels, selector := map[string]string{}, map[string]string{}
		spec := corev1.PodSpec{Containers: []corev1.Container{{
			Name:      "work",
			Resources: corev1.ResourceRequirements{Requests: each.list(0), Limits: corev1.ResourceList{}},
		}}}
		if each.Zone != "" {
			selector[corev1.LabelTopologyZone] = each.Zone
		}
		if each.CapacityType != "" {
			selector[v1.CapacityTypeLabelKey] = each.CapacityType
		}
		spec.NodeSelector = selector
		if len(each.GPUModels) > 0 {
			spec.Affinity = &corev1.Affinity{NodeAffinity: oneOf(gpuModelLabel, each.GPUModels)}
		}
		if each.AntiGroup != "" {
			labels[groupLabel] = each.AntiGroup
			spec.Affinity = &corev1.Affinity{PodAntiAffinity: &corev1.PodAntiAffinity{
				RequiredDuringSchedulingIgnoredDuringExecution: []corev1.PodAffinityTerm{{
					LabelSelector: &metav1.LabelSelector{MatchLabels: labels},
					TopologyKey:   corev1.LabelHostname,
				}},
			}}
		}
		if each.SpreadGroup != "" {
			labels[groupLabel] = each.SpreadGroup
			spec.TopologySpreadConstraints = []corev1.TopologySpreadConstraint{{
				MaxSkew:           1,
				TopologyKey:       corev1.LabelTopologyZone,
				WhenUnsatisfiable: corev1.DoNotSchedule,
				LabelSelector:     &metav1.LabelSelector{MatchLabels: labels},
			}}
		}
		meta := metav1.ObjectMeta{Name: each.Name, Namespace: "default", UID: types.UID(each.Name), Labels: labels}
		found = append(found, &corev1.Pod{ObjectMeta: meta, Spec: spec})
	}
	return found
}

func oneOf(label string, values []string) *corev1.NodeAffinity {
	return &corev1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &corev1.NodeSelector{
		NodeSelectorTerms: []corev1.NodeSelectorTerm{{MatchExpressions: []corev1.NodeSelectorRequirement{
			{Key: label, Operator: corev1.NodeSelectorOpIn, Values: values},
		}}},
	}}
}

// nodes returns what is there already: nodes that are not Karpenter's own, with what the case says is free on them.
func (c *benchCase) nodes() []*corev1.Node {
	found := make([]*corev1.Node, 0, len(c.Nodes))
	for _, each := range c.Nodes {
		labels := map[string]string{
			corev1.LabelHostname:           each.Name,
			corev1.LabelInstanceTypeStable: each.Type,
			corev1.LabelArchStable:         v1.ArchitectureAmd64,
			corev1.LabelOSStable:           string(corev1.Linux),
			corev1.LabelTopologyZone:       each.Zone,
			v1.CapacityTypeLabelKey:        each.CapacityType,
		}
		if each.GPUModel != "" {
			labels[gpuModelLabel] = each.GPUModel
		}
		has := each.list(podsPerNode)
		found = append(found, &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: each.Name, Labels: labels},
			Spec:       corev1.NodeSpec{ProviderID: fmt.Sprintf("peer://%s", each.Name)},
			Status:     corev1.NodeStatus{Allocatable: has, Capacity: has},
		})
	}
	return found
}
