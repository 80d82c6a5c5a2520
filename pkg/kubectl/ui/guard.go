// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package ui

import (
	"crypto/subtle"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// guard lets only requests through that the page itself makes, or the person who has its URL.
// The token is the first element of every path. So it is in no cookie, which the browser would
// send to any other port of this machine, too, and in no Referer, which a header forbids.
func guard(token string, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		setSecurityHeaders(w.Header())
		switch {
		// A name that somebody else's DNS resolves to this machine.
		case !isLoopback(r.Host):
			http.Error(w, "this server answers to 127.0.0.1 and localhost only", http.StatusMisdirectedRequest)
		case !sameOrigin(r):
			http.Error(w, "another page may not read this one", http.StatusForbidden)
		case !hasToken(r.URL.Path, token):
			http.Error(w, "the address lacks the token, or has an old one: use the one that kubectl gpu ui printed", http.StatusForbidden)
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD")
			http.Error(w, "nothing can be changed here", http.StatusMethodNotAllowed)
		default:
			http.StripPrefix("/"+token, next).ServeHTTP(w, r)
		}
	})
}

func setSecurityHeaders(h http.Header) {
	h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "+
		"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'")
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cross-Origin-Opener-Policy", "same-origin")
	h.Set("Cross-Origin-Resource-Policy", "same-origin")
	h.Set("Cache-Control", "no-store")
}

// isLoopback reports whether a Host header names this machine. The port may be another than the
// server's: that of a tunnel.
func isLoopback(host string) bool {
	name, _, err := net.SplitHostPort(host)
	if err != nil {
		name = host
	}
	return name == "127.0.0.1" || name == "localhost"
}

// sameOrigin reports whether a request was made by the page itself or by a person. Another page
// may link here, which shows it nothing, but not load anything.
func sameOrigin(r *http.Request) bool {
	if origin := r.Header.Get("Origin"); origin != "" {
		u, err := url.Parse(origin)
		return err == nil && u.Scheme == "http" && u.Host == r.Host
	}
	switch r.Header.Get("Sec-Fetch-Site") {
	case "", "none", "same-origin":
		return true
	default:
		return r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document"
	}
}

// hasToken compares in a time that says nothing of the token.
func hasToken(path, token string) bool {
	first, _, below := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	return below && subtle.ConstantTimeCompare([]byte(first), []byte(token)) == 1
}
