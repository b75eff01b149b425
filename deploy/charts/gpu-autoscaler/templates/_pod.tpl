{{/*
Processes of this release as YAML: name -> service, role of the spot watcher, and whether it uses the store, only reads
snapshots from it at its start, and uses the policy, Kubernetes and the cloud.
*/}}
{{- define "gpu-autoscaler.processes" -}}
{{- $isSimulated := include "gpu-autoscaler.isSimulated" . -}}
{{- $isSim := eq .Values.autoscaling.provider "sim" -}}
controller: {service: scaler, store: true, policy: true, kube: true, cloud: true}
scheduler: {service: scheduler, store: true, policy: true, kube: true}
pod-watcher: {service: pod_watcher, kube: true}
spot-watcher: {service: spot_watcher, role: central, snapshots: true, policy: true, kube: true, cloud: true}
{{- if and .Values.autoscaling.spot.enabled .Values.autoscaling.spot.gracefulEviction }}
spot-watcher-notices: {service: spot_watcher, role: {{ ternary "nodes" "node" $isSim }}, snapshots: {{ $isSim }}, cloud: {{ $isSim }}, onNodes: {{ not $isSim }}}
{{- if not $isSim }}
node-gateway: {service: node_gateway, snapshots: true, kube: {{ .Values.nats.authCallout.enabled }}}
{{- end }}
{{- end }}
dcgm-ingest: {service: dcgm_ingest, snapshots: true}
{{- if .Values.policy.shadow }}
shadow: {service: shadow, snapshots: true, policy: true}
{{- end }}
{{- if not $isSimulated }}
announcer: {service: announcer, snapshots: true, policy: true, kube: true}
policy-watcher: {service: policy_watcher, snapshots: true, policy: true, kube: true}
{{- end }}
cost-tracker: {service: cost_tracker, store: true}
gateway: {service: gateway, store: true, policy: true, kube: {{ and (or .Values.gateway.tokenReview .Values.gateway.oidc.issuer | empty | not) (not $isSimulated) }}}
{{- end }}

{{/*
Environment of a process: what the chart computes, `settings` of the values, and extraEnv of the service. A variable has one
source.
*/}}
{{- define "gpu-autoscaler.env" -}}
{{- $variables := include "gpu-autoscaler.computedEnv" . | fromYamlArray }}
{{- $sources := dict }}
{{- range $variables }}{{ $_ := set $sources .name "the chart" }}{{ end }}
{{- range include "gpu-autoscaler.settingsEnv" .root.Values.settings | fromYamlArray }}
{{- if hasKey $sources .name }}
{{- fail (printf "settings.%s: the chart sets it in pods of %s; remove it" .setting $.name) }}
{{- end }}
{{- $_ := set $sources .name "settings" }}
{{- $variables = append $variables (omit . "setting") }}
{{- end }}
{{- range $variable := .settings.extraEnv }}
{{- with get $sources $variable.name }}
{{- fail (printf "services.%s.extraEnv: %s is set by %s; remove it from extraEnv" $.name $variable.name .) }}
{{- end }}
{{- $_ := set $sources $variable.name "extraEnv" }}
{{- $variables = append $variables $variable }}
{{- end }}
{{- toYaml $variables }}
{{- end }}

{{/* The settings under `settings`: setting, and the environment variable of runtime/config.py. */}}
{{- define "gpu-autoscaler.settingsEnv" -}}
{{- range $section, $fields := . }}
{{- range $key, $value := $fields }}
{{- if kindIs "slice" $value }}{{ $value = join "," $value }}{{ end }}
{{- if not (kindIs "string" $value) }}{{ $value = include "gpu-autoscaler.literal" $value }}{{ end }}
- {setting: {{ $section }}.{{ $key }}, name: GPU_AUTOSCALER_{{ upper $section }}_{{ upper $key }}, value: {{ toJson $value }}}
{{- end }}
{{- end }}
{{- end }}

{{- define "gpu-autoscaler.computedEnv" -}}
{{- $root := .root }}{{ $values := .root.Values }}{{ $process := .process }}
{{- $isSimulated := include "gpu-autoscaler.isSimulated" $root -}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- $user := ternary "node_watcher" $process.service (not (empty $process.onNodes)) }}
{{- $hasToken := and $process.onNodes $values.nats.authCallout.enabled }}
{{- $hasCredentials := include "gpu-autoscaler.natsCredentials" $root }}
{{- if $hasCredentials }}
{{- else if $hasToken }}
- {name: GPU_AUTOSCALER_NATS_TOKEN_PATH, value: /var/run/secrets/gpu-autoscaler/token}
{{- else }}
- name: NATS_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ include "gpu-autoscaler.passwordsSecret" $root }}, key: {{ $user }}{{ if $process.command }}, optional: true{{ end }}}}
{{- end }}
- {name: GPU_AUTOSCALER_INSTANCE, value: $(POD_NAME)}
- name: GPU_AUTOSCALER_NATS_URL
  value: {{ include "gpu-autoscaler.natsUrl" (dict "root" $root "login" (ternary "" (printf "%s:$(NATS_PASSWORD)@" $user) (or $hasToken $hasCredentials | empty | not))) | quote }}
- {name: GPU_AUTOSCALER_NATS_REPLICAS_COUNT, value: {{ ternary $values.nats.replicas $values.nats.external.replicas $values.nats.enabled | int | quote }}}
{{- with $values.nats.streamLimits }}
{{- $limits := list }}
{{- range $stream, $limit := . }}{{ $limits = append $limits (printf "%s=%s" $stream $limit) }}{{ end }}
- {name: GPU_AUTOSCALER_NATS_STREAM_LIMITS, value: {{ join "," $limits | quote }}}
{{- end }}
{{- with $values.nats.tls }}
{{- if .secretName }}
- {name: GPU_AUTOSCALER_NATS_TLS_CA_PATH, value: /etc/gpu-autoscaler-nats/ca.crt}
{{- end }}
{{- if .clientSecretName }}
- {name: GPU_AUTOSCALER_NATS_TLS_CERTIFICATE_PATH, value: /etc/gpu-autoscaler-nats/tls.crt}
- {name: GPU_AUTOSCALER_NATS_TLS_KEY_PATH, value: /etc/gpu-autoscaler-nats/tls.key}
{{- end }}
{{- if .serverName }}
- {name: GPU_AUTOSCALER_NATS_TLS_SERVER_NAME, value: {{ .serverName | quote }}}
{{- end }}
{{- end }}
- {name: GPU_AUTOSCALER_LOG_LEVEL, value: {{ .settings.logLevel }}}
{{- if $process.onNodes }}
- name: HOST_IP
  valueFrom: {fieldRef: {fieldPath: status.hostIP}}
- {name: GPU_AUTOSCALER_HTTP_HOST, value: $(HOST_IP)}
- {name: GPU_AUTOSCALER_HTTP_PORT, value: {{ $values.sensing.hostPort | int | quote }}}
- name: GPU_AUTOSCALER_SENSING_NODE_NAME
  valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
- {name: GPU_AUTOSCALER_PROVIDER_NAME, value: {{ $values.autoscaling.provider }}}
{{- else }}
- {name: GPU_AUTOSCALER_HTTP_HOST, value: 0.0.0.0}
{{- end }}
{{- if $process.role }}
- {name: GPU_AUTOSCALER_SENSING_ROLE, value: {{ $process.role }}}
{{- end }}
{{- if and $process.role (eq $values.autoscaling.provider "sim") }}
- {name: GPU_AUTOSCALER_SENSING_METADATA_URL, value: "{{ $values.autoscaling.sim.url | default (include "gpu-autoscaler.simulationUrl" $root) }}/nodes/{node_name}"}
{{- end }}
{{- if and (eq $process.service "node_gateway") $values.nats.authCallout.enabled }}
- {name: GPU_AUTOSCALER_NATS_ISSUER_SEED_PATH, value: /var/run/secrets/gpu-autoscaler-issuer/seed}
- name: GPU_AUTOSCALER_NATS_NODE_ACCOUNT
  value: system:serviceaccount:{{ $root.Release.Namespace }}:{{ include "gpu-autoscaler.fullname" $root }}-spot-watcher-notices
{{- end }}
{{- if eq $process.service "dcgm_ingest" }}
- name: GPU_AUTOSCALER_SENSING_DCGM_URL
  value: {{ ternary (printf "%s/nodes/{node_name}/metrics" (include "gpu-autoscaler.simulationUrl" $root)) $values.sensing.dcgmUrl (not (empty $isSimulated)) | quote }}
- {name: GPU_AUTOSCALER_SENSING_DCGM_SCRAPE_SECONDS, value: {{ $values.sensing.scrapeSeconds | toString | quote }}}
{{- end }}
{{- if $process.kube }}
{{- if $isSimulated }}
- {name: GPU_AUTOSCALER_KUBE_URL, value: {{ include "gpu-autoscaler.simulationUrl" $root }}}
{{- else }}
- {name: GPU_AUTOSCALER_KUBE_IS_IN_CLUSTER, value: "true"}
{{- if and (eq $process.service "scaler") $values.leaderLease.enabled }}
- {name: GPU_AUTOSCALER_KUBE_IS_LEASE_MIRRORED, value: "true"}
{{- end }}
{{- end }}
- {name: GPU_AUTOSCALER_KUBE_NAMESPACE, value: {{ include "gpu-autoscaler.jobsNamespace" $root }}}
{{- if and (eq $process.service "pod_watcher") $values.jobs.watchQuotas }}
- {name: GPU_AUTOSCALER_KUBE_ARE_QUOTAS_WATCHED, value: "true"}
{{- end }}
{{- if and (eq $process.service "pod_watcher") $values.jobs.serveProvisioningRequests }}
- {name: GPU_AUTOSCALER_KUBE_ARE_PROVISIONING_REQUESTS_SERVED, value: "true"}
{{- end }}
{{- end }}
{{- if $process.cloud }}
- {name: GPU_AUTOSCALER_PROVIDER_NAME, value: {{ $values.autoscaling.provider }}}
{{- if eq $values.autoscaling.provider "sim" }}
- {name: GPU_AUTOSCALER_PROVIDER_URL, value: {{ $values.autoscaling.sim.url | default (include "gpu-autoscaler.simulationUrl" $root) | quote }}}
{{- end }}
{{- if eq $values.autoscaling.provider "karpenter" }}
- {name: GPU_AUTOSCALER_KARPENTER_NODE_CLASS, value: {{ $values.autoscaling.karpenter.nodeClass | quote }}}
- {name: GPU_AUTOSCALER_KARPENTER_OFFERS_PATH, value: /etc/gpu-autoscaler-cloud/offers.json}
{{- if eq $values.autoscaling.karpenter.mode "limits" }}
- {name: GPU_AUTOSCALER_KARPENTER_MODE, value: limits}
- {name: GPU_AUTOSCALER_KARPENTER_NODE_POOLS, value: {{ join "," $values.autoscaling.karpenter.nodePools | quote }}}
{{- end }}
{{- end }}
{{- if eq $values.autoscaling.provider "gcp" }}
{{- $groups := list }}
{{- range $pool, $named := $values.autoscaling.gcp.instanceGroups }}
{{- range $group := (kindIs "slice" $named | ternary $named (list $named)) }}
{{- $groups = append $groups (printf "%s=%s" $pool $group) }}
{{- end }}
{{- end }}
- {name: GPU_AUTOSCALER_GCP_PROJECT, value: {{ $values.autoscaling.gcp.projectID | quote }}}
{{- with $values.autoscaling.gcp.region }}
- {name: GPU_AUTOSCALER_GCP_REGION, value: {{ . | quote }}}
{{- end }}
- {name: GPU_AUTOSCALER_GCP_GROUPS, value: {{ join "," $groups | quote }}}
{{- with $values.autoscaling.gcp.sharedInstanceGroups }}
- {name: GPU_AUTOSCALER_GCP_SHARED_GROUPS, value: {{ join "," . | quote }}}
{{- end }}
{{- if $values.autoscaling.gcp.prices }}
- {name: GPU_AUTOSCALER_GCP_PRICES_PATH, value: /etc/gpu-autoscaler-cloud/prices.json}
{{- end }}
{{- end }}
{{- if eq $values.autoscaling.provider "azure" }}
{{- $sets := list }}
{{- range $pool, $set := $values.autoscaling.azure.vmScaleSets }}
{{- $sets = append $sets (printf "%s=%s" $pool $set) }}
{{- end }}
{{- $ceilings := list }}
{{- range $pattern, $usd := $values.autoscaling.azure.spotCeilings }}
{{- $ceilings = append $ceilings (printf "%s=%v" $pattern $usd) }}
{{- end }}
{{- with $values.autoscaling.azure }}
- {name: GPU_AUTOSCALER_AZURE_SUBSCRIPTION, value: {{ .subscriptionID | quote }}}
- {name: GPU_AUTOSCALER_AZURE_RESOURCE_GROUP, value: {{ .resourceGroup | quote }}}
- {name: GPU_AUTOSCALER_AZURE_REGION, value: {{ .region | quote }}}
{{- if .flexibleScaleSet }}
- {name: GPU_AUTOSCALER_AZURE_SCALE_SET, value: {{ .flexibleScaleSet | quote }}}
- {name: GPU_AUTOSCALER_AZURE_MACHINE_PATH, value: /etc/gpu-autoscaler-cloud/machine.json}
{{- end }}
{{- if .userData }}
- {name: GPU_AUTOSCALER_AZURE_USER_DATA_PATH, value: /etc/gpu-autoscaler-cloud/user-data}
{{- end }}
{{- if .prices }}
- {name: GPU_AUTOSCALER_AZURE_PRICES_PATH, value: /etc/gpu-autoscaler-cloud/prices.json}
{{- end }}
{{- range $name, $list := dict "INSTANCE_TYPES" .instanceTypes "SCALE_SETS" $sets "SPOT_CEILINGS" $ceilings }}
{{- if $list }}
- {name: GPU_AUTOSCALER_AZURE_{{ $name }}, value: {{ join "," $list | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq $values.autoscaling.provider "aws" }}
{{- $groups := list }}
{{- range $pool, $group := $values.autoscaling.aws.autoScalingGroups }}
{{- $groups = append $groups (printf "%s=%s" $pool $group) }}
{{- end }}
{{- $desiredCapacity := list }}
{{- range $pool, $group := $values.autoscaling.aws.desiredCapacityGroups }}
{{- $desiredCapacity = append $desiredCapacity (printf "%s=%s" $pool $group) }}
{{- end }}
{{- $placed := list }}
{{- range $pool, $group := $values.autoscaling.aws.placementGroups }}
{{- $placed = append $placed (printf "%s=%s" $pool $group) }}
{{- end }}
{{- $ceilings := list }}
{{- range $pattern, $usd := $values.autoscaling.aws.spotCeilings }}
{{- $ceilings = append $ceilings (printf "%s=%v" $pattern $usd) }}
{{- end }}
{{- with $values.autoscaling.aws }}
- {name: GPU_AUTOSCALER_AWS_REGION, value: {{ .region | quote }}}
{{- if .queueUrl }}
- {name: GPU_AUTOSCALER_AWS_QUEUE_URL, value: {{ .queueUrl | quote }}}
{{- end }}
{{- if .launchTemplate }}
- {name: GPU_AUTOSCALER_AWS_LAUNCH_TEMPLATE, value: {{ .launchTemplate | quote }}}
{{- end }}
{{- if .userData }}
- {name: GPU_AUTOSCALER_AWS_USER_DATA_PATH, value: /etc/gpu-autoscaler-cloud/user-data}
{{- end }}
{{- if .prices }}
- {name: GPU_AUTOSCALER_AWS_PRICES_PATH, value: /etc/gpu-autoscaler-cloud/prices.json}
{{- end }}
{{- if .spotAdvisor.data }}
- {name: GPU_AUTOSCALER_AWS_SPOT_ADVISOR_PATH, value: /etc/gpu-autoscaler-cloud/spot-advisor.json}
{{- end }}
{{- if .placementScoreCount }}
- {name: GPU_AUTOSCALER_AWS_PLACEMENT_SCORE_COUNT, value: {{ .placementScoreCount | int | quote }}}
{{- end }}
{{- range $name, $list := dict "SUBNETS" .subnets "INSTANCE_TYPES" .instanceTypes "GROUPS" $groups "DESIRED_CAPACITY_GROUPS" $desiredCapacity "CAPACITY_RESERVATIONS" .capacityReservations "PLACEMENT_GROUPS" $placed "SPOT_CEILINGS" $ceilings "SHARED_GROUPS" .sharedAutoScalingGroups }}
{{- if $list }}
- {name: GPU_AUTOSCALER_AWS_{{ $name }}, value: {{ join "," $list | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if or $process.store $process.snapshots }}
{{- if include "gpu-autoscaler.isSqlite" $root }}
- {name: GPU_AUTOSCALER_STORE_URL, value: "sqlite:////var/lib/gpu-autoscaler/store.db"}
{{- else }}
{{- $login := $values.store.postgresql }}
{{- if and (not $process.store) $login.reader.url }}{{ $login = $login.reader }}{{ end }}
- name: PGPASSWORD
  valueFrom: {secretKeyRef: {name: {{ $login.passwordSecret }}, key: password}}
- {name: GPU_AUTOSCALER_STORE_URL, value: {{ $login.url | quote }}}
{{- end }}
{{- end }}
{{- if $process.store }}
- {name: GPU_AUTOSCALER_STORE_SNAPSHOT_SECONDS, value: {{ $values.store.snapshotSeconds | toString | quote }}}
{{- range $name := list "span" "ledger" "plan" "job" "snapshot" "audit" "request" }}
- {name: GPU_AUTOSCALER_STORE_{{ upper $name }}_DAYS, value: {{ index $values.store (printf "%sDays" $name) | int | quote }}}
{{- end }}
{{- end }}
{{- if $process.policy }}
- {name: GPU_AUTOSCALER_POLICY_PATH, value: /etc/gpu-autoscaler/policy.toml}
{{- end }}
{{- if eq $process.service "shadow" }}
- {name: GPU_AUTOSCALER_POLICY_SHADOW_PATH, value: /etc/gpu-autoscaler/shadow.toml}
{{- end }}
{{- if eq $process.service "gateway" }}
- {name: GPU_AUTOSCALER_GATEWAY_HOST, value: 0.0.0.0}
{{- /* Templates of users could use the Secrets and service accounts of this release. */}}
{{- if and (not $isSimulated) (eq (include "gpu-autoscaler.jobsNamespace" $root) $root.Release.Namespace) }}
- {name: GPU_AUTOSCALER_GATEWAY_ARE_POD_TEMPLATES_ALLOWED, value: "false"}
{{- end }}
{{- if $process.kube }}
{{- if $values.gateway.tokenReview }}
- {name: GPU_AUTOSCALER_GATEWAY_IS_TOKEN_REVIEW_ENABLED, value: "true"}
{{- end }}
{{- with $values.gateway.oidc }}
{{- if .issuer }}
{{- range $name, $value := dict "ISSUER" .issuer "AUDIENCE" .audience "USER_CLAIM" .userClaim "USER_PREFIX" .userPrefix "GROUPS_CLAIM" .groupsClaim "GROUPS_PREFIX" .groupsPrefix }}
- {name: GPU_AUTOSCALER_GATEWAY_OIDC_{{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- if .caConfigMap }}
- {name: GPU_AUTOSCALER_GATEWAY_OIDC_CA_PATH, value: /etc/gpu-autoscaler-oidc/ca.crt}
{{- end }}
{{- end }}
{{- end }}
- {name: GPU_AUTOSCALER_GATEWAY_NAMESPACE, value: {{ $root.Release.Namespace }}}
- {name: GPU_AUTOSCALER_GATEWAY_ROLE_PREFIX, value: {{ include "gpu-autoscaler.fullname" $root }}}
{{- with $values.gateway }}
{{- if not .clusterTokens }}
- {name: GPU_AUTOSCALER_GATEWAY_IS_CLUSTER_TOKEN_ACCEPTED, value: "false"}
{{- end }}
{{- if not .singleRight }}
- {name: GPU_AUTOSCALER_GATEWAY_IS_SINGLE_RIGHT_ACCEPTED, value: "false"}
{{- end }}
{{- with .projectNamespaces }}
{{- $namespaces := list }}
{{- range $project, $namespace := . }}{{ $namespaces = append $namespaces (printf "%s=%s" $project $namespace) }}{{ end }}
- {name: GPU_AUTOSCALER_GATEWAY_PROJECT_NAMESPACES, value: {{ join "," $namespaces | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- if $values.gateway.tls.secretName }}
- {name: GPU_AUTOSCALER_GATEWAY_TLS_CERTIFICATE_PATH, value: /etc/gpu-autoscaler-tls/tls.crt}
- {name: GPU_AUTOSCALER_GATEWAY_TLS_KEY_PATH, value: /etc/gpu-autoscaler-tls/tls.key}
{{- end }}
{{- if or $isSimulated $values.gateway.tokensSecret }}
- name: GPU_AUTOSCALER_GATEWAY_TOKENS
  valueFrom: {secretKeyRef: {name: {{ include "gpu-autoscaler.tokensSecret" $root }}, key: tokens}}
{{- end }}
{{- end }}
{{- end }}

{{/* Security context of every container. */}}
{{- define "gpu-autoscaler.restrictions" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "gpu-autoscaler.podRestrictions" -}}
runAsNonRoot: true
runAsUser: {{ . }}
runAsGroup: {{ . }}
fsGroup: {{ . }}
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "gpu-autoscaler.pod" -}}
{{- $root := .root }}{{ $values := .root.Values }}{{ $process := .process }}{{ $settings := .settings }}
{{- $hasCloudFiles := and $process.cloud (include "gpu-autoscaler.hasCloudFiles" $root) }}
{{- $hasFile := and (or $process.store $process.snapshots) (include "gpu-autoscaler.isSqlite" $root) }}
{{- $hasCallout := $values.nats.authCallout.enabled }}
{{- $port := ternary ($values.sensing.hostPort | int) 8081 (not (empty $process.onNodes)) -}}
metadata:
  labels:
    {{- include "gpu-autoscaler.labels" $root | nindent 4 }}
    app.kubernetes.io/component: {{ .name }}
    {{- if $hasFile }}
    gpu-autoscaler.io/store: {{ $root.Release.Name }}
    {{- end }}
    {{- with $settings.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with $settings.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  {{- if $process.command }}
  restartPolicy: Never
  {{- end }}
  serviceAccountName: {{ include "gpu-autoscaler.fullname" $root }}-{{ .name }}
  automountServiceAccountToken: {{ and $process.kube (not (include "gpu-autoscaler.isSimulated" $root)) | default false }}
  enableServiceLinks: false # their variables would have the prefix of our settings
  terminationGracePeriodSeconds: 20 # messages in progress are finished within 10 s
  {{- if and (not $process.command) (or $values.priorityClasses.create $values.priorityClasses.name) }}
  priorityClassName: {{ $values.priorityClasses.name | default (printf "%s-system" (include "gpu-autoscaler.fullname" $root)) }}
  {{- end }}
  securityContext: {{- include "gpu-autoscaler.podRestrictions" 10001 | nindent 4 }}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with $settings.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if $process.onNodes }}
  hostNetwork: true
  dnsPolicy: ClusterFirstWithHostNet
  tolerations: [{operator: Exists}]
  affinity:
    nodeAffinity:
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions: [{key: {{ $values.sensing.nodeSelectorKey }}, operator: Exists}]
  {{- else }}
  {{- with $settings.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  affinity:
    nodeAffinity: # not on nodes that the scaler may remove
      requiredDuringSchedulingIgnoredDuringExecution:
        nodeSelectorTerms:
          - matchExpressions: [{key: gpu-autoscaler.io/action-id, operator: DoesNotExist}]
    {{- if $hasFile }}
    podAffinity: # one SQLite file: all pods that open it share a node
      requiredDuringSchedulingIgnoredDuringExecution:
        - topologyKey: kubernetes.io/hostname
          labelSelector: {matchLabels: {gpu-autoscaler.io/store: {{ $root.Release.Name }}}}
    {{- else if gt (int $settings.replicas) 1 }}
    podAntiAffinity: # prefer different nodes
      preferredDuringSchedulingIgnoredDuringExecution:
        - weight: 100
          podAffinityTerm:
            topologyKey: kubernetes.io/hostname
            labelSelector:
              matchLabels:
                {{- include "gpu-autoscaler.selector" $root | nindent 16 }}
                app.kubernetes.io/component: {{ .name }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .name }}
      image: {{ include "gpu-autoscaler.image" $root }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      {{- if $process.command }}
      command: {{- concat (list "python" "-m" "gpu_autoscaler_services.cli.main") $process.command | toYaml | nindent 8 }}
      env: {{- include "gpu-autoscaler.env" . | nindent 8 }}
      {{- else }}
      command: [python, -m, gpu_autoscaler_services.serve, {{ $process.service }}]
      env: {{- include "gpu-autoscaler.env" . | nindent 8 }}
      ports:
        - {name: http, containerPort: {{ $port }}}
        {{- if eq $process.service "gateway" }}
        - {name: api, containerPort: 8000}
        {{- end }}
      startupProbe: # at start a service reads missed facts: alive, but not ready
        httpGet: {path: /healthz, port: http}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: http}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- end }}
      resources: {{- toYaml $settings.resources | nindent 8 }}
      securityContext: {{- include "gpu-autoscaler.restrictions" $root | nindent 8 }}
      volumeMounts:
        - {name: scratch, mountPath: /tmp}
        {{- if and $process.onNodes $hasCallout }}
        - {name: token, mountPath: /var/run/secrets/gpu-autoscaler, readOnly: true}
        {{- end }}
        {{- if and (eq $process.service "node_gateway") $hasCallout }}
        - {name: issuer, mountPath: /var/run/secrets/gpu-autoscaler-issuer, readOnly: true}
        {{- end }}
        {{- if $hasFile }}
        - {name: store, mountPath: /var/lib/gpu-autoscaler}
        {{- end }}
        {{- if $process.policy }}
        - {name: policy, mountPath: /etc/gpu-autoscaler, readOnly: true}
        {{- end }}
        {{- if $hasCloudFiles }}
        - {name: cloud, mountPath: /etc/gpu-autoscaler-cloud, readOnly: true}
        {{- end }}
        {{- if $values.nats.tls.secretName }}
        - {name: nats-tls, mountPath: /etc/gpu-autoscaler-nats, readOnly: true}
        {{- end }}
        {{- if eq $process.service "gateway" }}
        {{- if $values.gateway.tls.secretName }}
        - {name: tls, mountPath: /etc/gpu-autoscaler-tls, readOnly: true}
        {{- end }}
        {{- if and $process.kube $values.gateway.oidc.issuer $values.gateway.oidc.caConfigMap }}
        - {name: oidc, mountPath: /etc/gpu-autoscaler-oidc, readOnly: true}
        {{- end }}
        {{- end }}
        {{- with $settings.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - {name: scratch, emptyDir: {sizeLimit: 64Mi}}
    {{- if and $process.onNodes $hasCallout }}
    - name: token # for the broker alone; it names pod and node
      projected: {sources: [{serviceAccountToken: {audience: {{ (include "gpu-autoscaler.code" $root | fromYaml).broker.tokenAudience }}, expirationSeconds: 3600, path: token}}]}
    {{- end }}
    {{- if and (eq $process.service "node_gateway") $hasCallout }}
    - name: issuer
      secret: {secretName: {{ $values.nats.authCallout.seedSecret }}, items: [{key: seed, path: seed}]}
    {{- end }}
    {{- if $hasFile }}
    - name: store
      persistentVolumeClaim: {claimName: {{ $values.store.sqlite.existingClaim | default (printf "%s-store" (include "gpu-autoscaler.fullname" $root)) }}}
    {{- end }}
    {{- if $process.policy }}
    - {name: policy, configMap: {name: {{ include "gpu-autoscaler.fullname" $root }}-policy}}
    {{- end }}
    {{- if $hasCloudFiles }}
    - {name: cloud, configMap: {name: {{ include "gpu-autoscaler.fullname" $root }}-cloud}}
    {{- end }}
    {{- with $values.nats.tls }}
    {{- if .secretName }}
    - name: nats-tls
      projected:
        defaultMode: 0440
        sources:
          - secret: {name: {{ .secretName }}, items: [{key: ca.crt, path: ca.crt}]} # not the broker's key
          {{- if .clientSecretName }}
          - secret: {name: {{ .clientSecretName }}, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}
          {{- end }}
    {{- end }}
    {{- end }}
    {{- if eq $process.service "gateway" }}
    {{- with $values.gateway.tls.secretName }}
    - {name: tls, secret: {secretName: {{ . }}, defaultMode: 0440, items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]}}
    {{- end }}
    {{- if and $process.kube $values.gateway.oidc.issuer $values.gateway.oidc.caConfigMap }}
    - {name: oidc, configMap: {name: {{ $values.gateway.oidc.caConfigMap }}, items: [{key: ca.crt, path: ca.crt}]}}
    {{- end }}
    {{- end }}
    {{- with $settings.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end }}
