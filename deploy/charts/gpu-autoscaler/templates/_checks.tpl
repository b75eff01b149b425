{{/* Checks that the JSON schema cannot express. */}}
{{- define "gpu-autoscaler.checks" -}}
{{- $code := include "gpu-autoscaler.code" . | fromYaml }}
{{- $missing := list }}
{{- if not .Values.autoscaling.provider }}{{ $missing = append $missing "autoscaling.provider" }}{{ end }}
{{- if not .Values.image.repository }}{{ $missing = append $missing "image.repository" }}{{ end }}
{{- if $missing }}
{{- fail (printf "%s: required; in the file of `helm upgrade --install ... -f values.yaml` set autoscaling.provider to one of %s (sim is a simulated cluster), and image.repository to the image in your registry; the chart's folder examples has a file for each provider" (join ", " $missing) (join ", " $code.providers)) }}
{{- end }}
{{- range $section, $fields := .Values.settings }}
{{- $paths := list $section }}
{{- if kindIs "map" $fields }}
{{- $paths = list }}
{{- range $key, $_ := $fields }}{{ $paths = append $paths (printf "%s.%s" $section $key) }}{{ end }}
{{- end }}
{{- range $path := $paths }}
{{- with get $code.refusedSettings $path }}
{{- fail (printf "settings.%s: refused: %s" $path .) }}
{{- end }}
{{- end }}
{{- end }}
{{- range $name, $project := .Values.jobs.projects }}
{{- if eq ($project.namespace | default "") $.Release.Namespace }}
{{- fail (printf "jobs.projects.%s.namespace: %s is the namespace of this release, whose Secrets and service accounts its jobs could use; choose another one" $name $project.namespace) }}
{{- end }}
{{- end }}
{{- if not (has .Values.autoscaling.provider $code.providers) }}
{{- fail (printf "autoscaling.provider: no driver for %s in this version; choose one of %s" .Values.autoscaling.provider (join ", " $code.providers)) }}
{{- end }}
{{- if eq .Values.autoscaling.provider "aws" }}
{{- with .Values.autoscaling.aws }}
{{- if not .region }}
{{- fail "autoscaling.aws.region: required; set the region of the cluster, e.g. eu-west-1" }}
{{- end }}
{{- if not (or .autoScalingGroups .desiredCapacityGroups (and .launchTemplate .subnets)) }}
{{- fail "autoscaling.aws.launchTemplate, subnets: required without autoScalingGroups; set the launch template of your GPU nodes and ids of subnets, one per zone" }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.autoscaling.provider "karpenter" }}
{{- if not .Values.autoscaling.karpenter.nodeClass }}
{{- fail "autoscaling.karpenter.nodeClass: required; set group/Kind/name of the node class of your GPU nodes, e.g. karpenter.k8s.aws/EC2NodeClass/gpu" }}
{{- end }}
{{- if and (eq .Values.autoscaling.karpenter.mode "limits") (not .Values.autoscaling.karpenter.nodePools) }}
{{- fail "autoscaling.karpenter.nodePools: required in mode limits; list the NodePools whose limits the autoscaler manages" }}
{{- end }}
{{- if not .Values.autoscaling.karpenter.offers }}
{{- fail "autoscaling.karpenter.offers: required, because Karpenter reports no prices; generate it with gpu-autoscaler prices catalog" }}
{{- end }}
{{- end }}
{{- if eq .Values.autoscaling.provider "azure" }}
{{- with .Values.autoscaling.azure }}
{{- if not (and .subscriptionID .resourceGroup .region) }}
{{- fail "autoscaling.azure: subscriptionID, resourceGroup and region are required" }}
{{- end }}
{{- if not (or .vmScaleSets .flexibleScaleSet) }}
{{- fail "autoscaling.azure.vmScaleSets: required, as pool: name of a uniform scale set; or set flexibleScaleSet and machine" }}
{{- end }}
{{- if and .flexibleScaleSet (not .machine) }}
{{- fail "autoscaling.azure.machine: required with flexibleScaleSet; set `properties` of a virtual machine as in Azure's API" }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.autoscaling.provider "gcp" }}
{{- with .Values.autoscaling.gcp }}
{{- if not .projectID }}
{{- fail "autoscaling.gcp.projectID: required; set the id of the cluster's project" }}
{{- end }}
{{- if not .instanceGroups }}
{{- fail "autoscaling.gcp.instanceGroups: required; set zonal managed instance groups, as pool: name or zone/name" }}
{{- end }}
{{- $region := .region }}
{{- range $pool, $groups := .instanceGroups }}
{{- range $group := (kindIs "slice" $groups | ternary $groups (list $groups)) }}
{{- if not (or $region (regexMatch "^[a-z0-9-]+-[a-z]/.+$" $group)) }}
{{- fail (printf "autoscaling.gcp.instanceGroups.%s: %s names no zone; set autoscaling.gcp.region to use the groups of that name in all its zones, or write zone/name, e.g. us-central1-a/%s" $pool $group $group) }}
{{- end }}
{{- if and $region (contains "/" $group) (not (hasPrefix (printf "%s-" $region) $group)) }}
{{- fail (printf "autoscaling.gcp.instanceGroups.%s: %s is not in region %s; correct the zone or autoscaling.gcp.region" $pool $group $region) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- if .Values.sensing.nvmlExporter.enabled }}
{{- if include "gpu-autoscaler.isSimulated" . }}
{{- fail "sensing.nvmlExporter.enabled: the simulated cluster has no GPUs to read; remove it" }}
{{- end }}
{{- if not (regexMatch "^http://[{]internal_ip[}]:[0-9]+/metrics$" .Values.sensing.dcgmUrl) }}
{{- fail (printf "sensing.nvmlExporter.enabled: it serves at http://{internal_ip}:<port>/metrics, and sensing.dcgmUrl is %s; set that form" .Values.sensing.dcgmUrl) }}
{{- end }}
{{- end }}
{{- $store := .Values.store }}
{{- if and $store.postgresql.url $store.sqlite.enabled }}
{{- fail "store: postgresql.url and sqlite.enabled are both set; unset one" }}
{{- end }}
{{- if and $store.postgresql.url (not $store.postgresql.passwordSecret) }}
{{- fail "store.postgresql.passwordSecret: required with store.postgresql.url; set the name of a Secret with the key password" }}
{{- end }}
{{- if and $store.postgresql.reader.url (not (and $store.postgresql.url $store.postgresql.reader.passwordSecret)) }}
{{- fail "store.postgresql.reader: requires store.postgresql.url, and in reader.passwordSecret the name of a Secret with the key password" }}
{{- end }}
{{- if not (or $store.postgresql.url $store.sqlite.enabled (include "gpu-autoscaler.isSimulated" .)) }}
{{- fail "store.postgresql.url: required on a real cluster; set postgresql://user@host:5432/database, or set store.sqlite.enabled to store jobs and plans in one file, which binds all pods that open it to one node" }}
{{- end }}
{{- if .Values.nats.enabled }}
{{- $broker := printf "%s-nats" (include "gpu-autoscaler.fullname" .) }}
{{- with (lookup "apps/v1" "StatefulSet" .Release.Namespace $broker).spec }}
{{- if and (eq (int .replicas) 1) (gt (int $.Values.nats.replicas) 1) }}
{{- fail (printf "nats.replicas: a single server that joins a cluster deletes its streams; delete StatefulSet %s first if that is meant: services publish again what is alive, jobs and costs are in the store, older history is lost" $broker) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.external.servers) }}
{{- fail "nats.external.servers: required if nats.enabled is false; set host:port of your NATS servers, or set nats.enabled" }}
{{- end }}
{{- $hasCredentials := include "gpu-autoscaler.natsCredentials" . }}
{{- if and $hasCredentials .Values.nats.enabled }}
{{- fail "settings.nats.credentials_path: requires nats.enabled=false; the broker of this release accepts passwords and, with nats.authCallout, tokens" }}
{{- end }}
{{- if and $hasCredentials .Values.nats.authCallout.enabled }}
{{- fail "settings.nats.credentials_path: excludes nats.authCallout; remove one of them" }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.passwordsSecret) (not $hasCredentials) }}
{{- fail "nats.passwordsSecret: required with an external broker; set the name of a Secret with a password for each user of files/users.conf, or settings.nats.credentials_path" }}
{{- end }}
{{- $generated := printf "%s-nats-users" (include "gpu-autoscaler.fullname" .) }}
{{- if eq .Values.nats.passwordsSecret $generated }}
{{- $owner := ((lookup "v1" "Secret" .Release.Namespace $generated).metadata | default dict).annotations | default dict }}
{{- if eq (get $owner "meta.helm.sh/release-name") .Release.Name }}
{{- fail (printf "nats.passwordsSecret: Secret %s belongs to this release, which would delete it; copy it under another name, and set that" $generated) }}
{{- end }}
{{- end }}
{{- if not (lookup "v1" "Namespace" "" "kube-system") }}
{{- $secret := "rendered without the cluster, the chart would write another password each time; create a Secret once by python -m gpu_autoscaler_services.permissions --secret NAME | kubectl create -f -, and set its name" }}
{{- if and .Values.nats.enabled (not .Values.nats.passwordsSecret) }}
{{- fail (printf "nats.passwordsSecret: %s" $secret) }}
{{- end }}
{{- if and (include "gpu-autoscaler.isSimulated" .) (not .Values.gateway.tokensSecret) }}
{{- fail (printf "gateway.tokensSecret: %s" $secret) }}
{{- end }}
{{- end }}
{{- with .Values.nats.authCallout }}
{{- if and .enabled (not (and .issuer .seedSecret)) }}
{{- fail "nats.authCallout: issuer and seedSecret are required; python -m gpu_autoscaler_services.permissions --issuer FILE creates a key" }}
{{- end }}
{{- end }}
{{- if and (not .Values.nats.tls.secretName) (or .Values.nats.tls.clientSecretName .Values.nats.tls.serverName) }}
{{- fail "nats.tls.secretName: required by nats.tls.clientSecretName and nats.tls.serverName; set the name of a Secret with ca.crt" }}
{{- end }}
{{- with .Values.gateway }}
{{- if and (not .tokenReview) (not .tokensSecret) (not .oidc.issuer) (not (include "gpu-autoscaler.isSimulated" $)) }}
{{- fail "gateway: no way to authenticate callers; set gateway.tokenReview, gateway.oidc.issuer or gateway.tokensSecret" }}
{{- end }}
{{- if and .oidc.issuer (not .oidc.audience) }}
{{- fail "gateway.oidc.audience: required with gateway.oidc.issuer; set the client id of the gateway, so that tokens for others are refused" }}
{{- end }}
{{- if and .oidc.issuer (include "gpu-autoscaler.isSimulated" $) }}
{{- fail "gateway.oidc.issuer: the simulated cluster cannot check rights; remove it" }}
{{- end }}
{{- if and .tls.certManager.name (not .tls.secretName) }}
{{- fail "gateway.tls.secretName: required with gateway.tls.certManager; set the name of the Secret that cert-manager writes" }}
{{- end }}
{{- end }}
{{- end }}
