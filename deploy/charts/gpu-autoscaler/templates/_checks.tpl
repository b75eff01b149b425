{{/* What no schema can say. */}}
{{- define "gpu-autoscaler.checks" -}}
{{- $code := include "gpu-autoscaler.code" . | fromYaml }}
{{- if not (has .Values.autoscaling.provider $code.providers) }}
{{- fail (printf "autoscaling.provider: this version has no driver for %s; it has %s" .Values.autoscaling.provider (join ", " $code.providers)) }}
{{- end }}
{{- if and (eq .Values.autoscaling.provider "aws") (not .Values.autoscaling.aws.region) }}
{{- fail "autoscaling.aws.region: is needed; the region of the cluster, e.g. eu-west-1" }}
{{- end }}
{{- if eq .Values.autoscaling.provider "karpenter" }}
{{- if not .Values.autoscaling.karpenter.nodeClass }}
{{- fail "autoscaling.karpenter.nodeClass: is needed; group/Kind/name of the class of your GPU nodes, e.g. karpenter.k8s.aws/EC2NodeClass/gpu" }}
{{- end }}
{{- if and (eq .Values.autoscaling.karpenter.mode "limits") (not .Values.autoscaling.karpenter.nodePools) }}
{{- fail "autoscaling.karpenter.nodePools: is needed with mode limits; the NodePools whose limits are ours to write" }}
{{- end }}
{{- if not .Values.autoscaling.karpenter.offers }}
{{- fail "autoscaling.karpenter.offers: is needed; what Karpenter's cloud sells, with prices, which Karpenter does not tell" }}
{{- end }}
{{- end }}
{{- if eq .Values.autoscaling.provider "azure" }}
{{- with .Values.autoscaling.azure }}
{{- if not (and .subscriptionID .resourceGroup .region) }}
{{- fail "autoscaling.azure: subscriptionID, resourceGroup and region are needed" }}
{{- end }}
{{- if not (or .vmScaleSets .flexibleScaleSet) }}
{{- fail "autoscaling.azure.vmScaleSets: is needed, as pool: name of a uniform scale set; or flexibleScaleSet and machine" }}
{{- end }}
{{- if and .flexibleScaleSet (not .machine) }}
{{- fail "autoscaling.azure.machine: is needed with flexibleScaleSet; `properties` of a machine, as Azure's API takes them" }}
{{- end }}
{{- end }}
{{- end }}
{{- if eq .Values.autoscaling.provider "gcp" }}
{{- with .Values.autoscaling.gcp }}
{{- if not .projectID }}
{{- fail "autoscaling.gcp.projectID: is needed; the id of the cluster's project" }}
{{- end }}
{{- if not .instanceGroups }}
{{- fail "autoscaling.gcp.instanceGroups: is needed; zonal managed groups, as pool: zone/name" }}
{{- end }}
{{- $region := .region }}
{{- range $pool, $groups := .instanceGroups }}
{{- range $group := (kindIs "slice" $groups | ternary $groups (list $groups)) }}
{{- if and $region (not (hasPrefix (printf "%s-" $region) $group)) }}
{{- fail (printf "autoscaling.gcp.instanceGroups.%s: %s is not in %s" $pool $group $region) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $store := .Values.store }}
{{- if and $store.postgresql.url $store.sqlite.enabled }}
{{- fail "store: both postgresql.url and sqlite.enabled are set; keep one" }}
{{- end }}
{{- if and $store.postgresql.url (not $store.postgresql.passwordSecret) }}
{{- fail "store.postgresql.passwordSecret: names no Secret; name one with the key password" }}
{{- end }}
{{- if not (or $store.postgresql.url $store.sqlite.enabled (include "gpu-autoscaler.isSimulated" .)) }}
{{- fail "store.postgresql.url: names no database for the store of record; name one (postgresql://user@host:5432/database), or set store.sqlite.enabled to keep it in a file on one volume, with all that open it on one node" }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.external.servers) }}
{{- fail "nats.external.servers: names no broker, and nats.enabled is off; name host:port of one, or switch it on" }}
{{- end }}
{{- if and (not .Values.nats.enabled) (not .Values.nats.passwordsSecret) }}
{{- fail "nats.passwordsSecret: a broker of yours has users of yours; name the Secret with a password for each user of files/users.conf" }}
{{- end }}
{{- if and (not .Values.gateway.tokenReview) (not .Values.gateway.tokensSecret) (not (include "gpu-autoscaler.isSimulated" .)) }}
{{- fail "gateway: nobody would be let in; switch tokenReview on, or name a tokensSecret" }}
{{- end }}
{{- end }}
