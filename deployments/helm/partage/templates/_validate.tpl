{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* What the schema cannot say. Each message names the value and the way out. */ -}}
{{- define "partage.validate" -}}

{{- /* Helm takes null for "no default", so that a section would be missing. */ -}}
{{- $values := .Values -}}
{{- range list "image" "host" "kubeletPlugin" "mpsSupervisor" "softwareLimits" "serviceAccount" "deviceClasses" "deviceClasses.gpu" "deviceClasses.mps" "deviceClasses.timeslice" "deviceClasses.mig" "admissionPolicy" "requestPolicy" "configPolicy" "annotationPolicy" "namespacePolicy" "mpsPodPolicy" "metrics" "metrics.nvidiaDRA" "metrics.serviceMonitor" "networkPolicy" "mpsNamespacePolicy" "viewRole" "alerts" "dashboards" "uninstallGuard" -}}
{{- $section := $values -}}
{{- range splitList "." . -}}
{{- $section = get $section . -}}
{{- end -}}
{{- if not (kindIs "map" $section) -}}
{{- fail (printf "%s is null: want an object with the values that differ from the defaults; leave it out where none does" .) -}}
{{- end -}}
{{- end -}}

{{- if not (.Capabilities.APIVersions.Has "resource.k8s.io/v1") -}}
{{- fail "this cluster does not serve resource.k8s.io/v1: dynamic resource allocation is turned off, or the API server was started with --runtime-config=resource.k8s.io/v1=false" -}}
{{- end -}}

{{- if not .Values.image.repository -}}
{{- fail "image.repository is empty: want the name, without a tag, of an image that you have pushed to a registry of yours, for example --set image.repository=registry.example.com/team/gpu-kubelet-plugin; docs/how-to/install.md says how to build it. There is no default, because whoever serves the image is root on every node" -}}
{{- end -}}
{{- with .Values.image -}}
{{- if or (contains "@" .repository) (regexMatch ":[^/]*$" .repository) -}}
{{- fail (printf "image.repository is %s: want it without a tag and a digest, which belong into image.tag and image.digest" .repository) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*$" .repository) -}}
{{- fail (printf "image.repository is %s: want a name such as registry.example.com/team/gpu-kubelet-plugin, in lower case" .repository) -}}
{{- end -}}
{{- if not (regexMatch "^([A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?$" (default "" .tag)) -}}
{{- fail (printf "image.tag is %s: want a tag such as 0.1.0, of letters, digits, '_', '.' and '-'; a digest belongs into image.digest" .tag) -}}
{{- end -}}
{{- if not (regexMatch "^(sha256:[0-9a-f]{64})?$" (default "" .digest)) -}}
{{- fail (printf "image.digest is %s: want \"sha256:\" and 64 digits from 0 to f" .digest) -}}
{{- end -}}
{{- end -}}

{{- include "partage.validateHost" .Values.host -}}
{{- with .Values.kubeletPlugin.kubeAPI -}}
{{- if lt (float64 .burst) (float64 .qps) -}}
{{- fail (printf "kubeletPlugin.kubeAPI.burst is %v, less than qps (%v): want at least as many, so that the requests of one second can be made at once" .burst .qps) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.kubeletPlugin.gpuNodesOnly .Values.kubeletPlugin.affinity -}}
{{- fail "kubeletPlugin.gpuNodesOnly is true, but kubeletPlugin.affinity replaces the affinity that it is for; name the labels there, or leave one of them out" -}}
{{- end -}}
{{- include "partage.validateResources" (list "kubeletPlugin.resources" .Values.kubeletPlugin.resources) -}}
{{- include "partage.validateResources" (list "mpsSupervisor.resources" .Values.mpsSupervisor.resources) -}}
{{- include "partage.validateResources" (list "uninstallGuard.resources" .Values.uninstallGuard.resources) -}}
{{- if not .Values.sharingPolicy -}}
{{- fail "sharingPolicy is empty: want at least apiVersion and kind, with which every kind of device is offered; leave it out for that" -}}
{{- end -}}
{{- include "partage.validatePolicy" .Values.sharingPolicy -}}

{{- with .Values.mpsNamespacePolicy -}}
{{- if and .classLabel (not .create) -}}
{{- fail (printf "mpsNamespacePolicy.classLabel is %q, and without mpsNamespacePolicy.create nothing looks at that label: set create to true, or remove classLabel" .classLabel) -}}
{{- end -}}
{{- end -}}

{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false, so serviceAccount.name must say which ServiceAccount to use; the default one would give every pod of the namespace the plugin's rights" -}}
{{- end -}}

{{- $classes := dict "gpu.resource.partage.dev" .Values.deviceClasses.gpu "mps.resource.partage.dev" .Values.deviceClasses.mps "timeslice.resource.partage.dev" .Values.deviceClasses.timeslice -}}
{{- range $name, $class := .Values.deviceClasses.migProfiles -}}
{{- if or (hasKey $classes $name) (has $name (list "gpu.nvidia.com" "mig.nvidia.com" "mps.partage.dev" "timeslice.partage.dev" "observer.partage.dev")) -}}
{{- fail (printf "deviceClasses.migProfiles: %s is a class of this chart already, choose another name" $name) -}}
{{- end -}}
{{- $_ := set $classes $name $class -}}
{{- end -}}
{{- $claimed := dict -}}
{{- range $name, $class := $classes -}}
{{- with $class.extendedResourceName -}}
{{- if hasKey $claimed . -}}
{{- fail (printf "deviceClasses: %s and %s both have extendedResourceName %s; the scheduler would use only one of them" (get $claimed .) $name .) -}}
{{- end -}}
{{- $_ := set $claimed . $name -}}
{{- end -}}
{{- end -}}

{{- if not .Values.mpsSupervisor.enabled -}}
{{- $offers := dict "default" (.Values.sharingPolicy.default | default dict) -}}
{{- range .Values.sharingPolicy.rules -}}
{{- $_ := set $offers (printf "rules: %s" .name) .offer -}}
{{- end -}}
{{- range $where, $offer := $offers -}}
{{- $kinds := ternary $offer.kinds (list "mps") (hasKey $offer "kinds") -}}
{{- range dig "mig" "shares" list $offer -}}
{{- if hasKey . "mps" -}}
{{- $kinds = append $kinds "mps" -}}
{{- end -}}
{{- end -}}
{{- if has "mps" $kinds -}}
{{- fail (printf "mpsSupervisor.enabled is false, but sharingPolicy (%s) offers mps, which nobody could use; name the other kinds in its \"kinds\"" $where) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* The same limits as in the programs, which would end when they start. */ -}}
{{- $durations := list
  (list "kubeletPlugin.nvmlCallLimit" .Values.kubeletPlugin.nvmlCallLimit 600 "10m" 10 "10s")
  (list "kubeletPlugin.pollInterval" .Values.kubeletPlugin.pollInterval 3600 "1h")
  (list "metrics.sampleInterval" .Values.metrics.sampleInterval 3600 "1h")
  (list "kubeletPlugin.claimCheckInterval" .Values.kubeletPlugin.claimCheckInterval 86400 "24h")
  (list "kubeletPlugin.orphanGrace" .Values.kubeletPlugin.orphanGrace 86400 "24h")
  (list "mpsSupervisor.checkInterval" .Values.mpsSupervisor.checkInterval 60 "1m")
-}}
{{- range $durations -}}
{{- $seconds := include "partage.seconds" (index . 1) | float64 -}}
{{- $least := concat (slice . 4) (list 0.05 "50ms") -}}
{{- if or (lt $seconds (float64 (index $least 0))) (gt $seconds (float64 (index . 2))) -}}
{{- fail (printf "%s is %s: want a time from %s to %s" (index . 0) (index . 1) (index $least 1) (index . 3)) -}}
{{- end -}}
{{- end -}}

{{- if eq (int .Values.metrics.nvidiaDRA.port) (int .Values.metrics.port) -}}
{{- fail (printf "metrics.nvidiaDRA.port is %d, as is metrics.port: want another one" (int .Values.metrics.port)) -}}
{{- end -}}

{{- if gt (include "partage.seconds" .Values.kubeletPlugin.policySpread | float64) 3600.0 -}}
{{- fail (printf "kubeletPlugin.policySpread is %s: want a time up to 1h" .Values.kubeletPlugin.policySpread) -}}
{{- end -}}

{{- end -}}
