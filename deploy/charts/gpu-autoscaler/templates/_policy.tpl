{{/* Policy file: keys under `policy`, or generated from the values under `autoscaling`. */}}
{{- define "gpu-autoscaler.policy" -}}
{{- $auto := .Values.autoscaling }}
{{- $keys := omit .Values.policy "text" "shadow" }}
{{- if .Values.policy.text }}
{{- if $keys }}
{{- fail (printf "policy.text: replaces all keys of the policy, but policy.%s is set as well; move it into policy.text" (keys $keys | sortAlpha | first)) }}
{{- end }}
{{- if and (not $auto.enabled) (not (regexMatch "(?m)^is_frozen *= *true" .Values.policy.text)) -}}
is_frozen = true
{{ end }}
{{- .Values.policy.text }}
{{- else }}
{{- if and $keys.pools $auto.nodePools }}
{{- fail "policy.pools: replaces autoscaling.nodePools, but both are set; remove one" }}
{{- end }}
{{- $policy := mergeOverwrite (include "gpu-autoscaler.valuesPolicy" . | fromYaml) (deepCopy $keys) }}
{{- if not $auto.enabled }}{{ $_ := set $policy "is_frozen" true }}{{ end }}
{{- range $key, $value := $policy }}
{{- if not (or (kindIs "map" $value) (kindIs "invalid" $value)) }}
{{ $key }} = {{ include "gpu-autoscaler.literal" $value }}
{{- end }}
{{- end }}
{{- range $table, $fields := $policy }}
{{- if kindIs "map" $fields }}

[{{ $table }}]
{{- range $key, $value := $fields }}
{{- if not (kindIs "invalid" $value) }}
{{ toJson $key }} = {{ include "gpu-autoscaler.literal" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The values under `autoscaling` as keys of the policy, in YAML. Invalid combinations fail with the next step. */}}
{{- define "gpu-autoscaler.valuesPolicy" -}}
{{- $auto := .Values.autoscaling -}}
pending_pod_timeout_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleUp.pendingPodTimeout }}
{{- if hasKey $auto.scaleDown "cooldown" }}
scale_down_cooldown_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleDown.cooldown }}
removal:
  pool_cooldown_seconds: {{ min 21600 (include "gpu-autoscaler.seconds" $auto.scaleDown.cooldown) }}
{{- end }}
nodes_count_min: {{ int $auto.limits.minNodes }}
nodes_count_max: {{ int $auto.limits.maxNodes }}
limits:
  scale_up_cooldown_seconds: {{ include "gpu-autoscaler.seconds" $auto.scaleUp.cooldown }}
utilization:
  high_ratio: {{ $auto.scaleUp.threshold }}
  low_ratio: {{ $auto.scaleDown.threshold }}
spot:
  capacity_pool_gpu_ratio_max: {{ if $auto.spot.diversify }}0.5{{ else }}1{{ end }}
  mix: {{- include "gpu-autoscaler.mix" $auto | nindent 4 }}
forecast:
  is_on: {{ $auto.predictive.enabled }}
  lookback_hours: {{ mul 24 (int $auto.predictive.lookbackDays) }}
  confidence_ratio_min: {{ $auto.predictive.confidenceThreshold }}
  prewarm_utilization_ratio_max: {{ $auto.predictive.preWarmThreshold }}
{{- with .Values.jobs }}
{{- if or .projects .namespaceTemplate .quota .priorityClasses }}
tenancy:
  namespace_template: {{ .namespaceTemplate | toJson }}
  quota: {{ .quota | toJson }}
  {{- if .namespaceTemplate }}
  admitted_namespaces: [{{ $.Release.Namespace }}]
  {{- end }}
  {{- if .priorityClasses }}
  priority_class_prefix: {{ include "gpu-autoscaler.fullname" $ }}
  {{- end }}
  projects:
  {{- range $name, $project := .projects }}
    - name: {{ $name | toJson }}
      {{- with $project.namespace }}
      namespace: {{ . | toJson }}
      {{- end }}
      {{- with $project.costCenter }}
      cost_center: {{ . | toJson }}
      {{- end }}
      quota: {{ $project.quota | default dict | toJson }}
  {{- else }} []
  {{- end }}
{{- end }}
{{- end }}
pools:
{{- range default (list (dict "name" "default")) $auto.nodePools }}
  - {{- include "gpu-autoscaler.pool" (dict "pool" . "isSpotOn" $auto.spot.enabled) | nindent 4 }}
{{- end }}
{{- end }}

{{/* The ratio of a share: up to 1 it is one, above 1 a percentage, as in AutoscalingPolicies (docs/decisions.md#shares). */}}
{{- define "gpu-autoscaler.ratio" -}}
{{- $share := float64 . -}}
{{ ternary (divf $share 100) $share (gt $share 1.0) }}
{{- end }}

{{/* GPU ratios by capacity type, of all pools without a share of their own. */}}
{{- define "gpu-autoscaler.mix" -}}
{{- $tiers := .multiTier }}
{{- $spot := float64 (include "gpu-autoscaler.ratio" .spot.targetPercentage) }}
{{- $reserved := 0.0 }}
{{- if $tiers.enabled }}
{{- $reserved = float64 (include "gpu-autoscaler.ratio" $tiers.reservedPercentage) }}
{{- if hasKey $tiers "spotPercentage" }}{{ $spot = float64 (include "gpu-autoscaler.ratio" $tiers.spotPercentage) }}{{ end }}
{{- if and .spot.enabled (hasKey $tiers "onDemandPercentage") }}
{{- $onDemand := float64 (include "gpu-autoscaler.ratio" $tiers.onDemandPercentage) }}
{{- if ne 100.0 (round (mulf 100 (addf $spot $onDemand $reserved)) 4) }}
{{- fail (printf "autoscaling.multiTier: the sum of spotPercentage (unset: spot.targetPercentage), onDemandPercentage and reservedPercentage is not 100 %%: %v, %v and %v; correct one of them" $spot $onDemand $reserved) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not .spot.enabled }}{{ $spot = 0.0 }}{{ end }}
{{- $reserved = minf $reserved (round (subf 1 $spot) 6) -}}
spot_ratio: {{ $spot }}
on_demand_ratio: {{ round (subf 1 $spot $reserved) 6 }}
reserved_ratio: {{ $reserved }}
{{- end }}

{{- define "gpu-autoscaler.pool" -}}
{{- $pool := .pool -}}
{{- $types := list }}
{{- $kind := $pool.capacityType | default "mixed" }}
{{- if ne $kind "mixed" }}{{ $types = list $kind }}{{ end }}
{{- $share := "" }}
{{- if hasKey $pool "spotPercentage" }}
{{- $share = include "gpu-autoscaler.ratio" $pool.spotPercentage }}
{{- $isWhole := ternary (eq 1.0 (float64 $share)) (eq 0.0 (float64 $share)) (eq $kind "spot") }}
{{- if not (or (eq $kind "mixed") $isWhole) }}
{{- fail (printf "autoscaling.nodePools: %s has capacityType %s; spotPercentage requires capacityType mixed" $pool.name $kind) }}
{{- else if eq 1.0 (float64 $share) }}{{ $types = list "spot" }}
{{- else if and (eq $kind "mixed") (eq 0.0 (float64 $share)) }}{{ $types = list "on-demand" "reserved" }}
{{- end }}
{{- end }}
{{- if not .isSpotOn }}
{{- if eq (join "," $types) "spot" }}
{{- fail (printf "autoscaling.nodePools: %s requires spot, but autoscaling.spot.enabled is false; set it to true, or change the pool's capacityType" $pool.name) }}
{{- end }}
{{- if not $types }}{{ $types = list "on-demand" "reserved" }}{{ end }}
{{- end -}}
name: {{ $pool.name | toJson }}
priority: {{ int ($pool.priority | default 0) }}
instance_types: {{ $pool.instanceTypes | default list | toJson }}
gpu_models: {{ if $pool.gpuType }}{{ list $pool.gpuType | toJson }}{{ else }}[]{{ end }}
zones: {{ $pool.availabilityZones | default list | toJson }}
capacity_types: {{ $types | toJson }}
{{- if and $share .isSpotOn }}
spot_ratio: {{ $share }}
{{- end }}
nodes_count_min: {{ int ($pool.minSize | default 0) }}
{{- if hasKey $pool "maxSize" }}
nodes_count_max: {{ int $pool.maxSize }}
{{- end }}
labels: {{ $pool.labels | default dict | toJson }}
{{- end }}
