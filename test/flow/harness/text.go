// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package harness

import "errors"

// AsError makes an error of the text of an answer, which is empty where there is none.
func AsError(text string) error {
	if text == "" {
		return nil
	}
	return errors.New(text)
}
