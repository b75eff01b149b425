// Karpenter's own scheduler on a case of the bench, as a library: no cluster, no cloud, only its decision.
//
// usage: karpenter CASE.json; prints one JSON object: seconds, CPU seconds, fleet cost, nodes, pods without a place.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"runtime"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/log"
	v1 "sigs.k8s.io/karpenter/pkg/apis/v1"
	"sigs.k8s.io/karpenter/pkg/cloudprovider"
	"sigs.k8s.io/karpenter/pkg/cloudprovider/fake"
	"sigs.k8s.io/karpenter/pkg/controllers/provisioning/scheduling"
	"sigs.k8s.io/karpenter/pkg/controllers/state"
	"sigs.k8s.io/karpenter/pkg/events"
	"sigs.k8s.io/karpenter/pkg/operator/injection"
	"sigs.k8s.io/karpenter/pkg/operator/logging"
	"sigs.k8s.io/karpenter/pkg/operator/options"
)

const poolName = "bench"

type answer struct {
	Seconds     float64 `json:"seconds"`
	CPUSeconds  float64 `json:"cpu_seconds"`
	USDPerHour  float64 `json:"usd_per_hour"`
	NodesCount  int     `json:"nodes_count"`
	Unplaced    int     `json:"unplaced_count"`
	OnExisting  int     `json:"on_existing_count"`
	SchedulerID string  `json:"scheduler"`
}

func main() {
	log.SetLogger(logging.NopLogger)
	given, err := read(os.Args[1])
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	found, err := decide(given)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	_ = json.NewEncoder(os.Stdout).Encode(found)
}

// decide is what Karpenter's provisioner does with a batch of pods, with its own defaults, on every core there is.
// The clock runs from the topology on: pods, types and nodes are known before, as they are to a running Karpenter.
func decide(given *benchCase) (*answer, error) {
	v1.WellKnownLabels.Insert(gpuModelLabel)
	settings := &options.Options{PreferencePolicy: options.PreferencePolicyRespect, MinValuesPolicy: options.MinValuesPolicyStrict}
	ctx := options.ToContext(injection.WithControllerName(context.Background(), "provisioner"), settings)
	byName := func(object client.Object) []string { return []string{object.(*corev1.Pod).Spec.NodeName} }
	reader := fakeclient.NewClientBuilder().WithIndex(&corev1.Pod{}, "spec.nodeName", byName).Build()
	cloud := fake.NewCloudProvider()
	cluster := state.NewCluster(clock.RealClock{}, reader, cloud)
	for _, node := range given.nodes() {
		if err := cluster.UpdateNode(ctx, node); err != nil {
			return nil, err
		}
	}
	pools := []*v1.NodePool{{ObjectMeta: metav1.ObjectMeta{Name: poolName, UID: poolName}}}
	pools[0].Spec.Template.Spec.NodeClassRef = &v1.NodeClassReference{Group: "peer", Kind: "NodeClass", Name: poolName}
	sold := map[string][]*cloudprovider.InstanceType{poolName: given.instanceTypes()}
	pods := given.pods()
	choices := []scheduling.Options{
		scheduling.DisableReservedCapacityFallback,
		scheduling.NumConcurrentReconciles(runtime.GOMAXPROCS(0)),
		scheduling.MinValuesPolicy(settings.MinValuesPolicy),
	}
	began, beganCPU := time.Now(), cpuSeconds()
	there := cluster.DeepCopyNodes().Active()
	topology, err := scheduling.NewTopology(ctx, reader, cluster, there, pools, sold, pods, choices...)
	if err != nil {
		return nil, err
	}
	recorder := events.NewRecorder(&record.FakeRecorder{})
	scheduler := scheduling.NewScheduler(
		ctx, reader, pools, cluster, there, topology, sold, nil, recorder, clock.RealClock{}, nil, choices...,
	)
	results, err := scheduler.Solve(ctx, pods)
	if err != nil {
		return nil, err
	}
	found := &answer{
		Seconds: time.Since(began).Seconds(), CPUSeconds: cpuSeconds() - beganCPU,
		NodesCount: len(results.NewNodeClaims), Unplaced: len(results.PodErrors), SchedulerID: "karpenter v1.12.1",
	}
	for _, node := range results.ExistingNodes {
		found.OnExisting += len(node.Pods)
	}
	for _, claim := range results.NewNodeClaims {
		found.USDPerHour += cheapest(claim)
	}
	return found, nil
}

// cheapest is what the claim costs with the least dear of the offerings that it may become.
func cheapest(claim *scheduling.NodeClaim) float64 {
	least := math.Inf(1)
	for _, each := range claim.InstanceTypeOptions {
		for _, offering := range each.Offerings.Available().Compatible(claim.Requirements) {
			least = min(least, offering.Price)
		}
	}
	return least
}

func cpuSeconds() float64 {
	var used syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &used)
	return float64(used.Utime.Sec+used.Stime.Sec) + float64(used.Utime.Usec+used.Stime.Usec)/1e6
}
